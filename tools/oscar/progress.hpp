#pragma once
// Progress on stderr. On a terminal: a bar with the time left, once the work has taken two seconds. Elsewhere: at most
// one line a minute.

#include <chrono>
#include <string>

namespace oscar::tool {

class Progress {
 public:
  // `label` names the work: "sampling", "loading".
  explicit Progress(std::string label);
  ~Progress();  // removes the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Share of the work done, 0 to 1. Cheap: prints only when due.
  void update(double fraction);

 private:
  using Clock = std::chrono::steady_clock;
  void draw(double fraction, double elapsed);

  std::string label_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_, last_;
};

// "1:05" of 65 seconds, "2:00:00" of two hours.
std::string clock_text(double seconds);

}  // namespace oscar::tool
