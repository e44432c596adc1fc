// Engine: many texts generated at once from one set of weights. Requests wait in a queue; whenever a slot and
// enough cache memory for the longest text that a request may become are free, the first one joins. Every
// step takes all texts that are being generated one token on and, with the rows that are left, reads the next
// pieces of prompts. Finished texts give their slot and pages back at once.
//
// What a text becomes does not depend on the others: the same ids alone and in any company (CPU: the same
// bits).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "infer/decoder.h"
#include "infer/request.h"

namespace sps {

struct EngineOptions {
  int64_t max_sequences = 8;   // generated at the same time
  int64_t cache_tokens = 0;    // positions of cache memory for all of them; 0: max_sequences whole contexts
  int64_t page = 64;           // positions of a page
  int64_t step_rows = 0;       // most positions of a step; 0: see DecoderOptions
  bool share_prefixes = true;  // see DecoderOptions
  bool program = true;         // see DecoderOptions
  const Int8Weights* int8 = nullptr;  // see DecoderOptions
};

struct Request {
  std::vector<int32_t> prompt;  // may be empty: a new document
  GenerateOptions options;
  std::vector<int32_t> stop_ids;   // one that is drawn ends the text (it is not part of it)
  std::vector<int32_t> forbidden;  // never drawn, besides what forbidden_ids names
  bool log_probabilities = false;
};

enum class Finish : uint8_t {
  no,
  length,       // max_new ids have been drawn
  end_of_text,  // the id is the end-of-text
  stop_id,      // the id is one of stop_ids
  failed,       // nothing could be drawn: `error` says why
};
std::string_view name_of(Finish finish);  // "no", "length", "end_of_text", "stop_id", "failed"

// What a step did for one text: the id that was drawn, and whether that was the last.
struct Drawn {
  int64_t handle = 0;
  int32_t id = -1;             // -1: none (max_new = 0, or failed)
  double log_probability = 0;  // of id under the model's own distribution, if the request wants it
  Finish finish = Finish::no;
  std::string error = {};
};

struct EngineMemory {
  DecoderMemory decoder;           // bytes
  int64_t bytes_per_position = 0;  // of persistent cache
  int64_t bytes_per_sequence = 0;  // of rings
  int64_t pages = 0, used_pages = 0,
          reserved_pages = 0;     // reserved: what live texts may still grow to, used included
  int64_t shared_positions = 0;   // of prompts, found in pages of texts before
  int64_t live = 0, waiting = 0;  // texts
};

class Engine {
 public:
  // The weights must outlive it.
  Engine(const ModelConfig& config, const ModelParameters& parameters, const ParameterStore& store,
         const EngineOptions& options = {});

  // Queues a request. Usage error if it makes no sense, does not fit the model's context, or needs more cache
  // than there is.
  int64_t add(Request request);
  // Ends a text that waits or is being generated; false if it has finished already.
  bool cancel(int64_t handle);
  // One step. Texts whose prompt has been read get one id each; they come in the order in which they joined.
  std::vector<Drawn> step();
  int64_t waiting() const { return int64_t(waiting_.size()); }
  bool idle() const { return waiting_.empty() && live_.empty(); }

  const ModelConfig& config() const { return decoder_.plan().config; }
  EngineMemory memory() const;
  ops::DecodeProgram::Launches program_launches() const { return decoder_.program_launches(); }

 private:
  struct Text {
    int64_t handle = 0, slot = -1, reserved = 0;
    Request request;
    std::vector<int32_t> ids;  // prompt, then what has been drawn
    int64_t prompt = 0;        // ids of the prompt
    int64_t fed = 0;           // ids that have been through the decoder
    NextId next;
    IdSet forbidden, seen;  // until it joins
    int64_t drawn() const { return int64_t(ids.size()) - prompt; }
  };

  void admit();
  std::vector<ops::SampleRow> settings_of(const std::vector<Text*>& readers) const;
  Drawn take(Text& text, const ops::Sampled& sampled) const;
  void leave(const Text& text);

  Decoder decoder_;
  int64_t next_handle_ = 0, reserved_ = 0;  // pages
  int64_t shared_positions_ = 0;
  std::deque<std::unique_ptr<Text>> waiting_;
  std::vector<std::unique_ptr<Text>> live_;  // in the order in which they joined
  // By slot: the ids that a text must not draw, and those that it holds. What a step's draws gave, on the
  // host.
  Exec ex_;
  Arena sets_;
  Tensor forbidden_, seen_;
  Bytes sampled_;
};

}  // namespace sps
