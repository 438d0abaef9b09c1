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
constexpr int kBarWidth = 24;

}  // namespace

std::string clock_text(double seconds) {
  const auto whole = static_cast<long>(std::ceil(std::max(0.0, seconds)));
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

Progress::Progress(std::string label)
    : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), last_(start_) {}

Progress::~Progress() {
  if (drawn_ && terminal_) fmt::print(stderr, "\r\x1b[K");
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
  if (terminal_) {
    const int filled = static_cast<int>(fraction * kBarWidth);
    fmt::print(stderr, "\r\x1b[K{} [{}{}] {:3.0f} % {}", label_, std::string(static_cast<std::size_t>(filled), '#'),
               std::string(static_cast<std::size_t>(kBarWidth - filled), '.'), 100 * fraction, left);
  } else {
    fmt::print(stderr, "{}: {:.0f} % {}\n", label_, 100 * fraction, left);
  }
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace oscar::tool
