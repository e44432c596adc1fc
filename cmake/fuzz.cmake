# Fuzzers (docs/fuzzing.md): fuzz/<name>_fuzz.cpp becomes the program fuzz_<name>. The rooms are compiled with
# libFuzzer's counters, AddressSanitizer and UndefinedBehaviorSanitizer; of compilers only clang has libFuzzer.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "SPS_FUZZ needs -DCMAKE_CXX_COMPILER=clang++, not ${CMAKE_CXX_COMPILER}")
endif()

target_compile_options(sps_flags INTERFACE
  -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
  -Wno-pass-failed)  # with counters in them, loops of "omp simd" stay scalar
target_link_options(sps_flags INTERFACE -fsanitize=address,undefined)

# The folders of seeds: one for each fuzzer.
add_executable(fuzz_seeds fuzz/seeds.cpp)
target_include_directories(fuzz_seeds PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(fuzz_seeds PRIVATE sps_convert)
add_custom_target(fuzzers DEPENDS fuzz_seeds)

function(sps_fuzzer name library)
  add_executable(fuzz_${name} fuzz/${name}_fuzz.cpp)
  target_include_directories(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(fuzz_${name} PRIVATE ${library})
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers fuzz_${name})
endfunction()

sps_fuzzer(tokenizer_json sps_tokenizer)
sps_fuzzer(gpt2_files sps_tokenizer)
sps_fuzzer(tiktoken sps_tokenizer)
sps_fuzzer(splitter sps_tokenizer)
sps_fuzzer(json_documents sps_data)
sps_fuzzer(documents sps_data)
sps_fuzzer(token_file sps_data)
sps_fuzzer(safetensors sps_tensor)
sps_fuzzer(checkpoint sps_model)
sps_fuzzer(run_config sps_train)
sps_fuzzer(score_bpe sps_tokenizer)
sps_fuzzer(llama_files sps_convert)
