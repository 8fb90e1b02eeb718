// The AdamW step over many tensors with 4-bit states (contract: kernels/step/adamw.py).
#define MT_SELF "step/adamw_lanes.h"
#include <atomic>
#include <memory>

#include "step/weights.h"

namespace memtrain {

enum Kind : int64_t { kExact, kBlock, kRank1, kFactored };
constexpr int64_t kFields = 28, kMaxDims = 8, kItem = 256, kGroup = 2 << 20;
constexpr int64_t kPart = 1024;  // of a row, where it goes through a buffer

// One row of the table that Python sends; the order is that of `_table` in kernels/step/adamw.py.
struct Row {
  float* p;  // of p_type, g of g_type: as floats only where both are
  const float* g;
  void* m;  // codes, or the moment itself
  float* m_scale;
  void* v;  // codes, the moment itself, or the row means
  float* v_scale;  // scales, or the column means
  const float *m_table, *v_table, *hyper;
  int64_t n, rows, cols, kind, dims, shape[kMaxDims], p_type, g_type;  // FloatType
  Beside beside;
};
static_assert(sizeof(Row) == kFields * 8, "the table's rows have 28 fields of 8 bytes");

struct Hyper {
  float decay, l2, sign, w1, b2, w2, step, eps;
};

// A row, and where it works: rank-1's maxima and reciprocals, factored's partial sums.
struct Task : Row {
  Hyper h;
  float *next = nullptr, *col_next = nullptr, *col_old = nullptr, *row_inv = nullptr,
        *col_inv = nullptr, *partial = nullptr, *ratio = nullptr;
  float unit = 1.0f;  // of the reciprocals
  int64_t chunk = 0;  // of pass 1: blocks (rank-1) or rows (factored)
  int64_t blocks() const { return (n + 127) / 128; }
  bool direct() const { return p_type == kFloat32 && g_type == kFloat32; }
  bool two_passes() const { return kind == kRank1 || kind == kFactored; }
};

static int64_t side(const Task& t) {  // length of the maxima of dimensions 1 and up
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

static int64_t plan_scratch(Task& t) {
  if (t.kind == kRank1) {
    // A private column buffer is merged once per item: at least 16 rows' worth of elements.
    t.chunk = std::max(kItem, t.cols * 16 / 128);
    return lines(t.rows + side(t)) + lines(t.rows) + 3 * lines(t.cols);
  }
  if (t.kind == kFactored) {
    t.chunk = std::max<int64_t>(64, 65536 / std::max<int64_t>(t.cols, 1));
    return lines(t.rows) + lines((t.rows + t.chunk - 1) / t.chunk * t.cols);
  }
  return 0;
}

static void place_scratch(Task& t, float* at) {
  if (t.kind == kRank1) {
    const bool matrix = t.dims == 2;
    t.next = at;
    t.row_inv = at += lines(t.rows + side(t));
    t.col_inv = at += lines(t.rows);
    t.col_old = at += lines(t.cols);
    t.col_next = matrix ? t.next + t.rows : at + lines(t.cols);
    std::fill(t.next, t.next + t.rows + side(t), 0.0f);
    if (matrix) {
      std::copy(t.v_scale + t.rows, t.v_scale + t.rows + t.cols, t.col_old);
    } else {
      std::fill(t.col_next, t.col_next + t.cols, 0.0f);
      portable::spread(t, t.v_scale, t.col_old);
    }
  } else if (t.kind == kFactored) {
    t.ratio = at;
    t.partial = at + lines(t.rows);
  }
}

static void cut(std::vector<Item>& items, int64_t task, int64_t n, int64_t chunk, bool first_pass) {
  for (int64_t i = 0; i < n; i += chunk)
    items.push_back({task, i, std::min(n, i + chunk), first_pass});
}

// All work, in an order that one thread could follow: a second pass comes after its first one, and
// soon, so that it finds its input in the cache, but other work lies between, so that a thread
// that has lost its core holds nobody up for long. `left` of a tensor: the items of its first pass,
// counted down, and one more until it is settled.
static std::vector<Item> make_items(const std::vector<Task>& tasks, std::atomic<int64_t>* left) {
  std::vector<Item> items, late, held;  // late: second passes of the group, held: of the one before
  int64_t elements = 0;
  const auto end_group = [&] {
    items.insert(items.end(), held.begin(), held.end());
    held.swap(late);
    late.clear();
    elements = 0;
  };
  for (int64_t i = 0; i < static_cast<int64_t>(tasks.size()); ++i) {
    const Task& t = tasks[i];
    if (elements + t.n > kGroup) end_group();
    elements += t.n;
    const size_t before = items.size();
    if (t.two_passes()) cut(items, i, t.kind == kRank1 ? t.blocks() : t.rows, t.chunk, true);
    left[i] = t.two_passes() ? static_cast<int64_t>(items.size() - before) + 1 : 0;
    cut(late, i, t.blocks(), kItem, false);
  }
  end_group(), end_group();
  return items;
}

static void work(std::vector<Task>& tasks, const std::vector<Item>& items,
                 std::atomic<int64_t>* left, std::atomic<size_t>& next) {
  Column column;
  for (size_t i; (i = next++) < items.size();) {
    const Item& item = items[i];
    Task& task = tasks[item.task];
    std::atomic<int64_t>& waited = left[item.task];
    if (!item.first_pass) {
      while (waited.load(std::memory_order_acquire) != 0) std::this_thread::yield();
      MT_DISPATCH(update(task, item.begin, item.end));
      continue;
    }
    MT_DISPATCH(look(task, item.begin, item.end, column));
    if (waited.fetch_sub(1) == 2) {  // the tensor's last: who did it settles the tensor
      MT_DISPATCH(settle(task));
      waited.store(0, std::memory_order_release);
    }
  }
}

}  // namespace memtrain

// `table`: int64 [n, 28], see Row.
MT_EXPORT void mt_adamw_step(const int64_t* table, int64_t n, int64_t threads) {
  using namespace memtrain;
  std::vector<Task> tasks(n);
  std::vector<int64_t> offset(n + 1, 0);
  int64_t elements = 0;
  for (int64_t i = 0; i < n; ++i) {
    __builtin_memcpy(static_cast<Row*>(&tasks[i]), table + i * kFields, sizeof(Row));
    __builtin_memcpy(&tasks[i].h, tasks[i].hyper, sizeof(Hyper));
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
  for (Task& t : tasks)
    if (t.kind == kRank1) std::copy(t.next, t.next + t.rows + side(t), t.v_scale);
}
