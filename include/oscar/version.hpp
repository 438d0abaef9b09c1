#pragma once

#define OSCAR_VERSION_MAJOR 0
#define OSCAR_VERSION_MINOR 1
#define OSCAR_VERSION_PATCH 0
#define OSCAR_VERSION_STRING "0.1.0"

namespace oscar {

inline constexpr int kRotationFormatVersion = 1;    // rotation files (docs/format.md)
inline constexpr int kStatisticsFormatVersion = 1;  // calibration statistics
inline constexpr int kPageLayoutVersion = 1;        // pages in memory

}  // namespace oscar
