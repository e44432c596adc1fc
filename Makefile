# sps.cpp. On a fresh Debian 12 each of these does all set-up by itself:
#   make        builds build/sps
#   make demo   trains four models side by side on real text and prints one table
#   make test   builds and runs all tests
#   make bench  measures the training step against the matrix-product ceiling and against PyTorch
#   make oracles     compares tokenizers and data with tiktoken, Hugging Face's tokenizers and pyarrow (installed by pip),
#                    and the models' gradients with PyTorch's where `make bench` has installed it
#   make bench-data  measures tokenizers and preparation, beside tiktoken and Hugging Face's tokenizers
#   make bench-inference  measures generation: decoding beside what memory gives, and prompts
#   make fuzz   runs every reader of foreign files on made-up input, FUZZ_SECONDS each (needs clang)
.PHONY: all demo test bench oracles bench-data bench-inference asan ubsan fuzz tidy format clean

BUILD := build
SETUP := $(BUILD)/.setup

all: $(SETUP)
	@[ -f $(BUILD)/build.ninja ] || cmake --preset release >$(BUILD)/configure.log || { cat $(BUILD)/configure.log; exit 1; }
	@ninja -C $(BUILD) sps

$(SETUP): scripts/setup.sh
	@scripts/setup.sh --stamp $@

demo: all
	@scripts/demo.sh

test: all
	@ninja -C $(BUILD)
	@cd $(BUILD) && ctest --output-on-failure

bench: all
	@scripts/bench.sh

oracles: $(SETUP)
	@scripts/oracles.sh

bench-data: all
	@scripts/bench_data.sh

bench-inference: all
	@scripts/bench_inference.sh

asan ubsan: $(SETUP)
	cmake --preset $@
	ninja -C $(BUILD)-$@
	cd $(BUILD)-$@ && ctest --output-on-failure

fuzz: $(SETUP)
	@scripts/fuzz.sh

tidy: $(SETUP)
	@scripts/tidy.sh

format:
	@git ls-files 'src/*.h' 'src/*.cpp' 'src/*.cc' 'tests/*.cpp' 'fuzz/*.h' 'fuzz/*.cpp' | xargs clang-format -i

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-ubsan $(BUILD)-fuzz $(BUILD)-portable
