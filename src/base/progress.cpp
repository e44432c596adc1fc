#include "base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <span>

#include "base/log.h"

namespace sps {

namespace {

constexpr double kTerminalPeriod = 0.1, kPlainPeriod = 5, kRateWindow = 30;

// Three digits, and the next unit as soon as three digits would show 1000.
std::string scaled(double n, double base, std::span<const char* const> units) {
  if (!std::isfinite(n)) return "?";
  size_t unit = 0;
  double magnitude = std::abs(n);
  while (unit + 1 < units.size() && magnitude >= (unit == 0 ? base : base - 0.5)) magnitude /= base, ++unit;
  const bool whole = unit == 0 && magnitude == std::floor(magnitude);
  const int decimals = whole || magnitude >= 99.95 ? 0 : magnitude >= 9.995 ? 1 : 2;
  return fmt::format("{}{:.{}f}{}{}", n < 0 ? "-" : "", magnitude, decimals, *units[unit] == 0 ? "" : " ",
                     units[unit]);
}

// At most `columns` code points, so that a terminal does not wrap the line.
std::string_view clipped(std::string_view text, int columns) {
  int seen = 0;
  for (size_t i = 0; i < text.size(); ++i)
    if ((text[i] & 0xC0) != 0x80 && ++seen > columns) return text.substr(0, i);
  return text;
}

}  // namespace

std::string human_count(double n) {
  static constexpr const char* units[] = {"", "k", "M", "B", "T"};
  return scaled(n, 1000, units);
}

std::string human_bytes(double bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  return scaled(bytes, 1024, units);
}

std::string human_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 0.9995) return fmt::format("{:.0f} ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const double whole = std::round(seconds);
  if (whole < 3600) return fmt::format("{} min {:02} s", int64_t(whole) / 60, int64_t(whole) % 60);
  const double minutes = std::round(seconds / 60);
  if (minutes < 24 * 60) return fmt::format("{} h {:02} min", int64_t(minutes) / 60, int64_t(minutes) % 60);
  const double hours = std::round(seconds / 3600);
  if (hours > 1e7) return "?";
  return fmt::format("{} d {:02} h", int64_t(hours) / 24, int64_t(hours) % 24);
}

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void RollingRate::add(double now, double total) {
  points_.emplace_back(now, total);
  // One point at or before the window's edge stays, so that the rate always spans the whole window.
  while (points_.size() > 2 && points_[1].first <= now - window_) points_.pop_front();
  // Many points within a moment say no more than the last of them.
  if (points_.size() > 2 && now - points_[points_.size() - 3].first < window_ / 100)
    points_.erase(points_.end() - 2);
}

double RollingRate::per_second() const {
  if (points_.size() < 2 || points_.back().first <= points_.front().first) return 0;
  return (points_.back().second - points_.front().second) / (points_.back().first - points_.front().first);
}

ProgressOutput ProgressOutput::standard_error() {
  ProgressOutput output;
  output.terminal = stderr_is_terminal();
  output.columns = [] {
    winsize size{};
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? int(size.ws_col) : 80;
  };
  output.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  return output;
}

Progress::Progress(std::string label, int64_t total, std::string unit, int64_t start, ProgressOutput output)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(total),
      start_(start),
      done_(start),
      output_(std::move(output)),
      rate_(kRateWindow),
      began_(output_.now()),
      shown_(began_) {
  rate_.add(began_, double(start_));
}

Progress::~Progress() {
  if (line_open_) output_.write("\n");
}

// "1.20 M tok", but "1.20 MB": the unit B is one of bytes.
std::string Progress::amount(double n, bool with_unit) const {
  static constexpr const char* bytes[] = {"B", "kB", "MB", "GB", "TB"};
  if (unit_ == "B") return scaled(n, 1000, bytes);
  return human_count(n) + (with_unit ? " " + unit_ : "");
}

std::string Progress::text(std::string_view extra, bool finished) const {
  const double elapsed = output_.now() - began_;
  const double rate = finished ? (elapsed > 0 ? double(done_ - start_) / elapsed : 0) : rate_.per_second();
  std::string line = label_ + " ";
  if (total_ > 0)
    line += fmt::format("{}/{}", amount(double(done_), false), amount(double(total_)));
  else
    line += amount(double(done_));
  if (total_ > 0) line += fmt::format(" {:.1f} %", 100.0 * double(done_) / double(total_));
  if (rate > 0) line += fmt::format(" | {}/s", amount(rate));
  if (finished)
    line += fmt::format(" | took {}", human_duration(elapsed));
  else if (total_ > 0 && rate > 0)
    line += fmt::format(" | {} left", human_duration(double(total_ - done_) / rate));
  if (!extra.empty()) line += fmt::format(" | {}", extra);
  return line;
}

void Progress::show(const std::string& line) {
  if (output_.terminal)
    output_.write(fmt::format("\r{}\x1b[K", clipped(line, output_.columns() - 1)));
  else
    output_.write(line + "\n");
  line_open_ = output_.terminal;
  ever_shown_ = true;
  shown_ = output_.now();
}

void Progress::update(int64_t done, std::string_view extra) {
  done_ = done;
  const double now = output_.now();
  rate_.add(now, double(done));
  // A terminal shows the first state at once. Elsewhere a line stays, so work that fails or ends at once has
  // none.
  if (output_.terminal ? ever_shown_ && now - shown_ < kTerminalPeriod : now - shown_ < kPlainPeriod) return;
  show(text(extra, false));
}

void Progress::message(std::string_view text) {
  output_.write(fmt::format("{}{}\n", line_open_ ? "\r\x1b[K" : "", text));
  line_open_ = false;
  // The next update draws the line again at once.
  if (output_.terminal) ever_shown_ = false;
}

void Progress::finish(int64_t done, std::string_view extra) {
  if (std::exchange(finished_, true)) return;
  done_ = done;
  if (!output_.terminal && !ever_shown_ && output_.now() - began_ < kPlainPeriod) return;
  show(text(extra, true));
  if (std::exchange(line_open_, false)) output_.write("\n");
}

}  // namespace sps
