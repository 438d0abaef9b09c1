#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <oscar/executor.hpp>
#include <set>
#include <thread>
#include <vector>

namespace oscar {
namespace {

// More threads than most test machines have cores, so that threads are preempted inside the pool's own code.
constexpr int kManyThreads = 8;

// Every call writes plain (not atomic) memory that the caller reads afterwards: the thread sanitizer sees a missing
// happens-before edge between the caller, the workers and the next call.
std::vector<int> squares(Executor& executor, int count) {
  std::vector<int> result(static_cast<std::size_t>(count), -1);
  executor.parallel_for(count, [&](int i) { result[static_cast<std::size_t>(i)] = i * i; });
  return result;
}

RC_GTEST_PROP(Executor, EveryBodyRunsExactlyOnce, ()) {
  const int num_threads = *rc::gen::inRange(1, kManyThreads + 1);
  const int count = *rc::gen::inRange(0, 200);
  const auto pool = make_thread_pool(num_threads);
  std::vector<int> runs(static_cast<std::size_t>(count), 0);
  pool->parallel_for(count, [&](int i) { ++runs[static_cast<std::size_t>(i)]; });
  RC_ASSERT(std::all_of(runs.begin(), runs.end(), [](int n) { return n == 1; }));
}

TEST(Executor, ConcurrencyIsTheNumberOfThreadsAndAtLeastOne) {
  EXPECT_EQ(serial_executor().concurrency(), 1);
  EXPECT_EQ(make_thread_pool(3)->concurrency(), 3);
  for (const int too_few : {1, 0, -5}) EXPECT_EQ(make_thread_pool(too_few)->concurrency(), 1) << too_few;
}

TEST(Executor, NothingRunsForACountOfZeroOrLess) {
  const auto pool = make_thread_pool(kManyThreads);
  for (const int count : {0, -1}) {
    pool->parallel_for(count, [&](int) { ADD_FAILURE() << "a body ran for count " << count; });
    serial_executor().parallel_for(count, [&](int) { ADD_FAILURE() << "a body ran for count " << count; });
  }
}

TEST(Executor, SerialRunsInOrderOnTheCallingThread) {
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int> order;
  serial_executor().parallel_for(5, [&](int i) {
    order.push_back(i);
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

// All bodies wait for each other: the call only returns when as many run at once as concurrency() says.
TEST(Executor, AsManyBodiesRunAtOnceAsConcurrencySays) {
  const auto pool = make_thread_pool(4);
  std::mutex mutex;
  std::condition_variable all_here;
  int arrived = 0;
  std::set<std::thread::id> threads;
  pool->parallel_for(4, [&](int) {
    std::unique_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
    if (++arrived == 4) all_here.notify_all();
    all_here.wait(lock, [&] { return arrived == 4; });
  });
  EXPECT_EQ(threads.size(), 4U);
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 1U) << "the calling thread takes part";
}

TEST(Executor, TheCallReturnsAfterTheSlowestBody) {
  const auto pool = make_thread_pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> started{0};
    bool worker_done = false;
    pool->parallel_for(2, [&](int) {
      ++started;
      while (started.load() < 2) std::this_thread::yield();  // each thread has one of the two bodies
      if (std::this_thread::get_id() == caller) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      worker_done = true;
    });
    ASSERT_TRUE(worker_done) << "round " << round;
  }
}

TEST(Executor, WhatABodyWroteIsSeenAfterTheCall) {
  const auto pool = make_thread_pool(kManyThreads);
  for (int round = 0; round < 500; ++round) {
    const int count = 1 + round % 17;
    ASSERT_EQ(squares(*pool, count), squares(serial_executor(), count)) << "round " << round;
  }
}

// Decoding calls the pool a few times a layer and token: a worker that is late for one call must not take its
// bodies to the next, whose count and function differ.
TEST(Executor, ShortCallsInARowNeverMix) {
  const auto pool = make_thread_pool(kManyThreads);
  std::vector<int> owner(64, -1);
  for (int call = 0; call < 2000; ++call) {
    const int count = 2 + call % 63;
    pool->parallel_for(count, [&owner, call](int i) { owner[static_cast<std::size_t>(i)] = call; });
    for (int i = 0; i < count; ++i) ASSERT_EQ(owner[static_cast<std::size_t>(i)], call) << "body " << i;
  }
}

TEST(Executor, PoolsOfSeveralThreadsWorkSideBySide) {
  std::vector<std::thread> users;
  std::atomic<int> wrong{0};
  for (int user = 0; user < 3; ++user) {
    users.emplace_back([&wrong] {
      const auto pool = make_thread_pool(2);
      for (int round = 0; round < 100; ++round) {
        if (squares(*pool, 50) != squares(serial_executor(), 50)) ++wrong;
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Executor, APoolThatNeverWorkedEndsCleanly) {
  for (int i = 0; i < 50; ++i) EXPECT_EQ(make_thread_pool(kManyThreads)->concurrency(), kManyThreads);
}

}  // namespace
}  // namespace oscar
