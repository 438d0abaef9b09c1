#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace oscar::tool {
namespace {

constexpr double kQuietSeconds = 2;     // shorter work shows no bar
constexpr double kRedrawSeconds = 0.1;  // on a terminal
constexpr double kLogLineSeconds = 60;  // elsewhere
constexpr std::size_t kBarWidth = 24;

}  // namespace

std::string clock_text(double seconds) {
  const auto whole = static_cast<long>(std::ceil(std::max(0.0, seconds)));
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

Progress::Progress(std::string label)
    : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), last_(start_) {}

Progress::~Progress() {
  if (drawn_ && terminal_) std::fputs("\r\x1b[K", stderr);
}

void Progress::update(double fraction) {
  const auto now = Clock::now();
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double since_last = std::chrono::duration<double>(now - last_).count();
  const bool due = terminal_ ? elapsed >= kQuietSeconds && since_last >= kRedrawSeconds : since_last >= kLogLineSeconds;
  if (!due) return;
  last_ = now;
  draw(std::clamp(fraction, 0.0, 1.0), elapsed);
}

void Progress::draw(double fraction, double elapsed) {
  const std::string left = fraction > 0 ? clock_text(elapsed * (1 - fraction) / fraction) + " left" : "";
  std::string line = fmt::format("{}: {:.0f} % {}\n", label_, 100 * fraction, left);
  if (terminal_) {
    const auto filled = static_cast<std::size_t>(fraction * kBarWidth);
    line = fmt::format("\r\x1b[K{} [{}{}] {:3.0f} % {}", label_, std::string(filled, '#'),
                       std::string(kBarWidth - filled, '.'), 100 * fraction, left);
  }
  std::fputs(line.c_str(), stderr);  // fmt::print would throw where stderr cannot be written
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace oscar::tool
