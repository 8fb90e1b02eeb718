// The fused step over many tensors with compressed states (contract: kernels/step/step.py).
#define MT_SELF "step/reduce.h"
#include <atomic>
#include <cfloat>
#include <memory>

#include "step/table.h"

namespace memtrain {

constexpr int64_t kItem = 256, kGroup = 2 << 20;
constexpr int64_t kPart = 1024;  // of a row, where it goes through a buffer

static int64_t side(const StepTask& t) {  // length of the maxima of dimensions 1 and up
  int64_t sum = 0;
  for (int64_t d = 1; d < t.dims; ++d) sum += t.shape[d];
  return sum;
}

// A thread's own maxima of columns, from a whole cache line on.
struct Column {
  std::vector<int32_t> held;
  int32_t* zeros(int64_t n) {
    held.assign(n + 16, 0);
    return reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(held.data()) + 63) & ~uintptr_t{63});
  }
};

MT_INLINE void raise(int32_t* at, int32_t x) {
  int32_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < x &&
         !__atomic_compare_exchange_n(at, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace memtrain

#include "foreach_isa.h"

namespace memtrain {

// Blocks (of pass 1 of factored: rows) of a tensor.
struct Item {
  int64_t task, begin, end;
  bool first_pass;
};

// Vectors begin at whole cache lines: lanes across two would cost twice.
static int64_t lines(int64_t n) { return (n + 15) / 16 * 16; }

static int64_t plan_scratch(StepTask& t) {
  if (t.second == kRank1) {
    // A private column buffer is merged once per item: at least 16 rows' worth of elements.
    t.chunk = std::max(kItem, t.cols * 16 / 128);
    return lines(t.rows + side(t)) + lines(t.rows) + 3 * lines(t.cols);
  }
  if (t.second == kFactored) {
    t.chunk = std::max<int64_t>(64, 65536 / std::max<int64_t>(t.cols, 1));
    const int64_t sums = lines(t.rows) + lines((t.rows + t.chunk - 1) / t.chunk * t.cols);
    return t.bits == 2 ? sums + lines(t.rows) + 2 * lines(t.cols) : sums;
  }
  return 0;
}

static void place_scratch(StepTask& t, float* at) {
  if (t.second == kRank1) {
    const bool matrix = t.dims == 2;
    t.next = at;
    t.row_inv = at += lines(t.rows + side(t));
    t.col_inv = at += lines(t.rows);
    t.col_old = at += lines(t.cols);
    t.col_next = matrix ? t.next + t.rows : at + lines(t.cols);
    std::fill(t.next, t.next + t.rows + side(t), 0.0f);
    if (matrix) {
      std::copy(t.state[1].scale + t.rows, t.state[1].scale + t.rows + t.cols, t.col_old);
    } else {
      std::fill(t.col_next, t.col_next + t.cols, 0.0f);
      portable::spread(t, t.state[1].scale, t.col_old);
    }
  } else if (t.second == kFactored) {
    t.ratio = at;
    t.partial = at += lines(t.rows);
    if (t.bits == 2) {
      t.row_inv = at += lines((t.rows + t.chunk - 1) / t.chunk * t.cols);
      t.col_inv = at += lines(t.rows);
      t.col_next = at + lines(t.cols);
    }
  }
}

// What rank-1 and 2 bits have in scratch until the step's end, into the state.
static void keep_scratch(const StepTask& t) {
  if (t.bits == 2) {
    std::copy(t.ratio, t.ratio + t.rows, portable::old_rows(t));
    std::copy(t.col_next, t.col_next + t.cols, portable::old_columns(t));
  }
  if (t.second == kRank1) std::copy(t.next, t.next + t.rows + side(t), t.state[1].scale);
}

static void cut(std::vector<Item>& items, int64_t task, int64_t n, int64_t chunk, bool first_pass) {
  for (int64_t i = 0; i < n; i += chunk)
    items.push_back({task, i, std::min(n, i + chunk), first_pass});
}

// All work, in an order that one thread could follow: a second pass comes after its first one, and
// soon, so that it finds its input in the cache, but other work lies between, so that a thread
// that has lost its core holds nobody up for long. `left` of a tensor: the items of its first pass,
// counted down, and one more until its scales are final.
static std::vector<Item> make_items(const std::vector<StepTask>& tasks, std::atomic<int64_t>* left) {
  std::vector<Item> items, late, held;  // late: second passes of the group, held: of the one before
  int64_t elements = 0;
  const auto end_group = [&] {
    items.insert(items.end(), held.begin(), held.end());
    held.swap(late);
    late.clear();
    elements = 0;
  };
  for (int64_t i = 0; i < static_cast<int64_t>(tasks.size()); ++i) {
    const StepTask& t = tasks[i];
    if (elements + t.n > kGroup) end_group();
    elements += t.n;
    const size_t before = items.size();
    if (t.two_passes()) cut(items, i, t.second == kRank1 ? t.blocks() : t.rows, t.chunk, true);
    left[i] = t.two_passes() ? static_cast<int64_t>(items.size() - before) + 1 : 0;
    cut(late, i, t.blocks(), kItem, false);
  }
  end_group(), end_group();
  return items;
}

static void update(const StepTask& task, int64_t begin, int64_t end) {
  if (task.bits == 2) MT_DISPATCH(update_adamw2(task, begin, end));
  else update_blocks(task, begin, end);
}

static void work(std::vector<StepTask>& tasks, const std::vector<Item>& items,
                 std::atomic<int64_t>* left, std::atomic<size_t>& next) {
  Column column;
  for (size_t i; (i = next++) < items.size();) {
    const Item& item = items[i];
    StepTask& task = tasks[item.task];
    std::atomic<int64_t>& waited = left[item.task];
    if (!item.first_pass) {
      while (waited.load(std::memory_order_acquire) != 0) std::this_thread::yield();
      update(task, item.begin, item.end);
      continue;
    }
    MT_DISPATCH(reduce(task, item.begin, item.end, column));
    if (waited.fetch_sub(1) == 2) {  // the tensor's last item of pass 1
      MT_DISPATCH(finalize_scales(task));
      waited.store(0, std::memory_order_release);
    }
  }
}

}  // namespace memtrain

struct CountCall {
  const int64_t* counters;
  float* counts;
  int64_t n;
};

// Adds a step to each of n counters, float32, and copies them.
MT_EXPORT void mt_count_step(const CountCall* call) {
  for (int64_t i = 0; i < call->n; ++i)
    call->counts[i] = *reinterpret_cast<float*>(call->counters[i]) += 1;
}

struct StepCall {
  const int64_t* table;  // int64 [n, 32], see Row
  int64_t n, threads;
};

MT_EXPORT void mt_step(const StepCall* call) {
  using namespace memtrain;
  const auto [table, n, threads] = *call;
  std::vector<StepTask> tasks(n);
  std::vector<int64_t> offset(n + 1, 0);
  int64_t elements = 0;
  for (int64_t i = 0; i < n; ++i) {
    __builtin_memcpy(static_cast<Row*>(&tasks[i]), table + i * kFields, sizeof(Row));
    offset[i + 1] = offset[i] + plan_scratch(tasks[i]);
    elements += tasks[i].n;
  }
  std::unique_ptr<float[]> scratch(new float[offset[n] + 16]);
  float* line = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.get()) + 63) & ~uintptr_t{63});
  for (int64_t i = 0; i < n; ++i) place_scratch(tasks[i], line + offset[i]);
  std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[n]);
  const std::vector<Item> items = make_items(tasks, left.get());
  std::atomic<size_t> next{0};
  const int64_t crew = std::max<int64_t>(1, std::min(threads, elements / 32768));
  parallel_for(crew, 1, crew, [&](int64_t, int64_t) { work(tasks, items, left.get(), next); });
  for (const StepTask& t : tasks) keep_scratch(t);
}
