# sps.cpp. On a fresh Debian 12 each of these does all set-up by itself:
#   make        builds build/sps
#   make demo   trains four models side by side on real text and prints one table
#   make test   builds and runs all tests
#   make bench  measures the training step against the matrix-product ceiling and against PyTorch
.PHONY: all demo test bench asan ubsan tidy format clean

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

asan ubsan: $(SETUP)
	cmake --preset $@
	ninja -C $(BUILD)-$@
	cd $(BUILD)-$@ && ctest --output-on-failure

tidy: $(SETUP)
	@scripts/tidy.sh

format:
	@git ls-files 'src/*.h' 'src/*.cpp' 'src/*.cc' 'tests/*.cpp' | xargs clang-format -i

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-ubsan $(BUILD)-portable
