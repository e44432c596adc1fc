// Progress of long work on standard error: on a terminal one line that is rewritten, otherwise a plain line
// every few seconds. Also how counts, bytes and times are written for people.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace sps {

std::string human_count(double n);           // 1234567 -> "1.23 M"; k, M, B, T are powers of 1000
std::string human_bytes(double bytes);       // 1536 -> "1.50 KiB"
std::string human_duration(double seconds);  // "250 ms", "12.3 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"

double monotonic_seconds();  // for measuring, not a date

// Amount per second over the last `window` seconds. Times must not go backwards.
class RollingRate {
 public:
  explicit RollingRate(double window) : window_(window) {}
  void add(double now, double total);  // `total` is a running sum
  double per_second() const;           // 0 until two different times are known

 private:
  double window_;
  std::deque<std::pair<double, double>> points_;
};

// Where progress is shown and which clock it reads; tests bring their own.
struct ProgressOutput {
  bool terminal = false;
  std::function<int()> columns;                 // width of the terminal
  std::function<void(std::string_view)> write;  // text as it stands, newlines included
  std::function<double()> now = monotonic_seconds;

  static ProgressOutput standard_error();
};

class Progress {
 public:
  // `total` <= 0: unknown. `start`: what an earlier run already did; it counts as done but not for the rate.
  Progress(std::string label, int64_t total, std::string unit, int64_t start = 0,
           ProgressOutput output = ProgressOutput::standard_error());
  ~Progress();  // ends the line where it stands, so that an error message starts on its own
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Cheap; writes at most ten times a second on a terminal, and otherwise every five seconds, the first time
  // after five.
  void update(int64_t done, std::string_view extra = {});
  // Prints a message above the progress line.
  void message(std::string_view text);
  // The last state with the time it took. Not as a plain line if that was less than five seconds: then an
  // error that comes next, or the result, says enough.
  void finish(int64_t done, std::string_view extra = {});

 private:
  std::string amount(double n, bool with_unit = true) const;
  std::string text(std::string_view extra, bool finished) const;
  void show(const std::string& line);

  std::string label_, unit_;
  int64_t total_, start_, done_;
  ProgressOutput output_;
  RollingRate rate_;
  double began_, shown_;  // the start; the last line
  bool line_open_ = false, ever_shown_ = false, finished_ = false;
};

}  // namespace sps
