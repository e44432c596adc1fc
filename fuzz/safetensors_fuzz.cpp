// A safetensors file.
#include "fuzz/fuzz.h"
#include "tensor/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  static const fuzz::Scratch scratch;
  fuzz::accepts([&] {
    const SafeTensors file(std::as_bytes(std::span(data, size)), "x.safetensors");
    const auto* begin = static_cast<const void*>(data);
    const auto* end = static_cast<const void*>(data + size);
    bool writable = !file.tensors().empty();
    for (const auto& [name, tensor] : file.tensors()) {
      SPS_CHECK(tensor.data >= begin && tensor.data <= end);
      const auto room = uint64_t(static_cast<const uint8_t*>(end) - static_cast<const uint8_t*>(tensor.data));
      SPS_CHECK(tensor.bytes <= room);
      SPS_CHECK(tensor.count() * int64_t(stored_size(tensor.dtype)) == int64_t(tensor.bytes));
      writable = writable && !name.empty();
    }
    if (!writable) return;
    // What is written from it says the same.
    fuzz::must_accept([&] {
      const auto path = scratch.path() / "again.safetensors";
      write_safetensors(path, file.tensors(), file.metadata());
      const SafeTensors again(path);
      SPS_CHECK(again.metadata() == file.metadata() && again.tensors().size() == file.tensors().size());
      for (const auto& [name, tensor] : file.tensors()) {
        const StoredTensor& other = again.tensors().at(name);
        SPS_CHECK(other.dtype == tensor.dtype && other.shape == tensor.shape && other.bytes == tensor.bytes);
        SPS_CHECK(std::equal(static_cast<const char*>(tensor.data),
                             static_cast<const char*>(tensor.data) + tensor.bytes,
                             static_cast<const char*>(other.data)));
      }
    });
  });
  return 0;
}
