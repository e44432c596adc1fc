#include "cli/cli.h"

int main(int argc, char** argv) { return sps::run_command_line(argc, argv); }
