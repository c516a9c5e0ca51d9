// SPDX-License-Identifier: MIT OR Apache-2.0
// A runtime library with the functions of CUDA's runtime under the prefix `standin`, over the
// stand-in accelerator (see CONTRIBUTING.md), for tests.
//
// The stand-in's own library differs from CUDA in ways that matter, so this one implements events
// and queries itself:
// - An event that is recorded again does not change earlier waits.
// - A stream is idle only when its last task has ended.
// - Destroying a stream does not wait for its work.
//
// PyTorch runs the kernels of the stand-in on the calling thread, at once. Its streams therefore
// order nothing by themselves: a wait of such a stream also blocks the calling thread.
//
// For tests, copies are delayed at random, memory has a limit, and handles are counted.

#include <include/openreg.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kUnknown = 999;
constexpr int kDefaultCopy = 4;

// A point on a stream.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::chrono::steady_clock::time_point at;

  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      at = std::chrono::steady_clock::now();
      reached = true;
    }
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }

  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Point> point;

  std::shared_ptr<Point> current() {
    std::lock_guard<std::mutex> lock(mutex);
    return point;
  }
};

struct Counters {
  std::atomic<long> streams{0}, events{0}, copies{0}, copied_bytes{0};
  // Waits of PyTorch's streams for a copy: all of them, and those for a copy that had ended.
  std::atomic<long> waits{0}, waits_for_ended{0};
};

std::mutex g_mutex;
// The number of unfinished tasks of each stream that this library created.
std::unordered_map<orStream_t, std::shared_ptr<std::atomic<long>>> g_streams;
std::unordered_map<void*, size_t> g_sizes;
std::unordered_map<void*, size_t> g_registered;
size_t g_limit = SIZE_MAX, g_bytes = 0, g_peak = 0;
Counters g_counters;
std::atomic<int> g_most_delay_us{0};
// Waits that are left out, so that tests can show that they find it.
constexpr int kSkipCopies = 1, kSkipReuse = 2, kSkipStaging = 4;
std::atomic<int> g_skipped{0};
std::mt19937 g_random{1};

// The last error of this thread, as CUDA's runtime remembers it.
thread_local int t_last_error = kSuccess;

int remembered(int code) {
  if (code != kSuccess) {
    t_last_error = code;
  }
  return code;
}

std::shared_ptr<std::atomic<long>> own(orStream_t stream) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto found = g_streams.find(stream);
  return found == g_streams.end() ? nullptr : found->second;
}

template <typename Task>
int submit(orStream_t stream, Task task) {
  auto pending = own(stream);
  if (pending) {
    ++*pending;
  }
  auto run = [pending, task]() mutable {
    task();
    if (pending) {
      --*pending;
    }
  };
  return openreg::addTaskToStream(stream, run) == orSuccess ? kSuccess : kInvalidHandle;
}

// Adds a point after the tasks so far. Once it is reached, the tasks before it count as ended.
int submit_point(orStream_t stream, std::shared_ptr<Point> point) {
  return openreg::addTaskToStream(stream, [point] { point->reach(); }) == orSuccess
      ? kSuccess
      : kInvalidHandle;
}

int delay_us() {
  int most = g_most_delay_us.load();
  if (most <= 0) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  return std::uniform_int_distribution<int>(0, most)(g_random);
}

bool on_device(const void* pointer) {
  orPointerAttributes attributes;
  return orPointerGetAttributes(&attributes, pointer) == orSuccess &&
      attributes.type == orMemoryTypeDevice;
}

int copy_now(void* to, const void* from, size_t bytes) {
  orMemcpyKind kind = on_device(to)
      ? (on_device(from) ? orMemcpyDeviceToDevice : orMemcpyHostToDevice)
      : (on_device(from) ? orMemcpyDeviceToHost : orMemcpyHostToHost);
  return orMemcpy(to, from, bytes, kind) == orSuccess ? kSuccess : kInvalidValue;
}

} // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API standinGetDeviceCount(int* count) { return orGetDeviceCount(count); }
API standinGetDevice(int* device) { return orGetDevice(device); }
API standinSetDevice(int device) { return orSetDevice(device); }

API standinDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return kSuccess;
}

API standinMalloc(void** start, size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (bytes > g_limit - std::min(g_limit, g_bytes)) {
      return remembered(kOutOfMemory);
    }
    g_bytes += bytes;
    g_peak = std::max(g_peak, g_bytes);
  }
  bool failed = orMalloc(start, bytes) != orSuccess;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (failed) {
    g_bytes -= bytes;
    return remembered(kOutOfMemory);
  }
  g_sizes[*start] = bytes;
  return kSuccess;
}

API standinFree(void* start) {
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto found = g_sizes.find(start);
    if (found == g_sizes.end()) {
      return kInvalidValue;
    }
    g_bytes -= found->second;
    g_sizes.erase(found);
  }
  return orFree(start) == orSuccess ? kSuccess : kInvalidValue;
}

API standinMallocHost(void** start, size_t bytes) {
  return remembered(orMallocHost(start, bytes) == orSuccess ? kSuccess : kOutOfMemory);
}

API standinFreeHost(void* start) {
  return orFreeHost(start) == orSuccess ? kSuccess : kInvalidValue;
}

API standinHostRegister(void* start, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return remembered(g_registered.emplace(start, bytes).second ? kSuccess : kInvalidValue);
}

API standinHostUnregister(void* start) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return remembered(g_registered.erase(start) == 1 ? kSuccess : kInvalidValue);
}

// Returns how many bytes of host memory are registered.
extern "C" __attribute__((visibility("default"))) long standinRegistered() {
  std::lock_guard<std::mutex> lock(g_mutex);
  long bytes = 0;
  for (const auto& [start, size] : g_registered) {
    bytes += static_cast<long>(size);
  }
  return bytes;
}

API standinMemGetInfo(size_t* available, size_t* total) {
  std::lock_guard<std::mutex> lock(g_mutex);
  *total = std::min<size_t>(g_limit, size_t{1} << 30);
  *available = *total - std::min(*total, g_bytes);
  return kSuccess;
}

API standinMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return kind == kDefaultCopy ? copy_now(to, from, bytes) : kInvalidValue;
}

API standinMemcpyAsync(void* to, const void* from, size_t bytes, int kind, orStream_t stream) {
  if (kind != kDefaultCopy) {
    return kInvalidValue;
  }
  ++g_counters.copies;
  g_counters.copied_bytes += static_cast<long>(bytes);
  int delay = delay_us();
  return submit(stream, [=] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    copy_now(to, from, bytes);
  });
}

API standinMemsetAsync(void* start, int byte, size_t bytes, orStream_t stream) {
  return submit(stream, [=] {
    orMemoryUnprotect(start);
    std::memset(start, byte, bytes);
    orMemoryProtect(start);
  });
}

API standinStreamCreateWithPriority(orStream_t* stream, unsigned, int priority) {
  int code = orStreamCreateWithPriority(stream, 0, priority < 0 ? 1 : 0);
  if (code != orSuccess) {
    return kUnknown;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  g_streams[*stream] = std::make_shared<std::atomic<long>>(0);
  ++g_counters.streams;
  return kSuccess;
}

API standinStreamDestroy(orStream_t stream) {
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_streams.erase(stream) == 0) {
      return kInvalidHandle;
    }
    --g_counters.streams;
  }
  // Runs the rest of the tasks, and may be called on the stream's own thread.
  std::thread([stream] { orStreamDestroy(stream); }).detach();
  return kSuccess;
}

API standinStreamQuery(orStream_t stream) {
  if (auto pending = own(stream)) {
    return remembered(pending->load() == 0 ? kSuccess : kNotReady);
  }
  return remembered(orStreamQuery(stream) == orSuccess ? kSuccess : kNotReady);
}

API standinStreamSynchronize(orStream_t stream) {
  auto point = std::make_shared<Point>();
  int code = submit_point(stream, point);
  if (code == kSuccess) {
    point->wait();
  }
  return code;
}

API standinStreamWaitEvent(orStream_t stream, Event* event, unsigned) {
  auto point = event->current();
  if (!point) {
    return kSuccess;
  }
  bool is_own = own(stream) != nullptr;
  if (g_skipped & (is_own ? kSkipReuse : kSkipCopies)) {
    return kSuccess;
  }
  int code = submit(stream, [point] { point->wait(); });
  if (code == kSuccess && !is_own) {
    ++g_counters.waits;
    if (point->is_reached()) {
      ++g_counters.waits_for_ended;
    }
    point->wait();
  }
  return code;
}

API standinEventCreateWithFlags(Event** event, unsigned) {
  *event = new Event;
  ++g_counters.events;
  return kSuccess;
}

API standinEventDestroy(Event* event) {
  delete event;
  --g_counters.events;
  return kSuccess;
}

API standinEventRecord(Event* event, orStream_t stream) {
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->point = point;
  }
  return submit_point(stream, point);
}

API standinEventQuery(Event* event) {
  auto point = event->current();
  return remembered(!point || point->is_reached() ? kSuccess : kNotReady);
}

API standinEventSynchronize(Event* event) {
  auto point = event->current();
  if (point && !(g_skipped & kSkipStaging)) {
    point->wait();
  }
  return kSuccess;
}

API standinEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  auto from = start->current(), to = end->current();
  if (!from || !to) {
    return kInvalidHandle;
  }
  if (!from->is_reached() || !to->is_reached()) {
    return remembered(kNotReady);
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return kSuccess;
}

API standinLaunchHostFunc(orStream_t stream, void (*function)(void*), void* argument) {
  return submit(stream, [=] { function(argument); });
}

API standinGetLastError() {
  int code = t_last_error;
  t_last_error = kSuccess;
  return code;
}

API standinPeekAtLastError() { return t_last_error; }

// For tests: the most that a copy is delayed, in microseconds, and the seed of the delays.
API standinDelayCopies(int most_us, unsigned seed) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_random.seed(seed);
  g_most_delay_us = most_us;
  return kSuccess;
}

// For tests: leaves out waits: 1 of PyTorch's streams for a copy, 2 of a copy for the work that
// used its target before, 4 of the host for a copy. The sum leaves out several.
API standinSkipWaits(int skipped) {
  g_skipped = skipped;
  return kSuccess;
}

// For tests: limits the memory of all devices together, in bytes.
API standinLimitMemory(size_t bytes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_limit = bytes;
  return kSuccess;
}

// For tests: the numbers of streams, events and bytes that exist, the most bytes that existed, the
// copies and their bytes, and the waits of PyTorch's streams, all of them and those for a copy that
// had ended.
API standinCounters(long counters[8]) {
  std::lock_guard<std::mutex> lock(g_mutex);
  long values[8] = {
      g_counters.streams, g_counters.events, static_cast<long>(g_bytes),
      static_cast<long>(g_peak), g_counters.copies, g_counters.copied_bytes,
      g_counters.waits, g_counters.waits_for_ended};
  std::memcpy(counters, values, sizeof(values));
  return kSuccess;
}
