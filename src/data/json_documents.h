// The text and the id of a document that is a JSON object.
//
//   {"id": "doc-5", "text": "Once upon a time\n", "meta": {"source": "web"}}
//
// A field is named by its name, or by names joined with dots for an object within the object: "meta.source".
// The text must be a string or null, which is an empty text; so is a null in place of an object on the way.
// The id is a string or a whole number, as it is written; anything else, or an empty one, is no id.
//
// The whole object is checked: it must be JSON in UTF-8. A string with bytes that are not UTF-8, or with a
// \u escape that is half a surrogate pair, is refused and not repaired: it is a sign that something went
// wrong before. Nesting deeper than 64 and a text or id field that is there twice are refused too. Fields
// that nobody asked for may be repeated, and numbers in them may have any size.
#pragma once

#include <string>
#include <string_view>

#include "data/documents.h"

namespace sps {

// Sets document.text, and document.id where the object has an id. `place` names the object in errors.
void parse_json_document(std::string_view json, std::string_view place, std::string_view text_field,
                         std::string_view id_field, Document& document);

}  // namespace sps
