// Entry points of the attention kernels: checks, task lists to kernel parameters, tensor maps.
#include <cuda.h>

#include <atomic>
#include <cmath>

#include "api.h"
#include "host.h"
#include "launch.h"
#include "backward_sm90.cuh"

#define DISTFLASH_TRY(expr) \
    if (const char* message = (expr)) return message

namespace distflash {
namespace {

// ---------------------------------------------------------------- checks

const char* check_tensor(const char* name, const distflash_tensor& t, int unit) {
    if (t.data == nullptr) return error("%s is a null pointer", name);
    if (reinterpret_cast<uintptr_t>(t.data) % 16 || t.batch_stride % unit ||
        t.head_stride % unit || t.seq_stride % unit)
        return error("%s must be 16-byte aligned with strides that are multiples of %d elements; "
                     "make it contiguous", name, unit);
    return nullptr;
}

const char* check_block(const distflash_block& b, int idx) {
    if (b.batch < 0 || b.q_heads < 0 || b.kv_heads < 0 || b.q_len < 0 || b.k_len < 0)
        return error("task %d has a negative extent", idx);
    if (b.q_len >= kFar || b.k_len >= kFar)
        return error("task %d: %d queries and %d keys; a task holds fewer than 2^30", idx, b.q_len,
                     b.k_len);
    if (b.kv_heads == 0 ? b.q_heads != 0 : b.q_heads % b.kv_heads)
        return error("task %d: %d query heads are not a multiple of %d KV heads", idx, b.q_heads,
                     b.kv_heads);
    if (b.mask < DISTFLASH_MASK_FULL || b.mask > DISTFLASH_MASK_WINDOW)
        return error("task %d: mask kind %d is unknown", idx, b.mask);
    if (b.mask == DISTFLASH_MASK_WINDOW && b.window < 1)
        return error("task %d: a window of %lld keys; it must be at least 1", idx,
                     static_cast<long long>(b.window));
    return nullptr;
}

const char* check_options(const distflash_options& o) {
    if (o.dtype != DISTFLASH_BF16 && o.dtype != DISTFLASH_FP16)
        return error("dtype %d is not supported; use bf16 or fp16", o.dtype);
    if (!(o.softmax_scale > 0.f) || !std::isfinite(o.softmax_scale))
        return error("softmax_scale %g is not a positive finite number", o.softmax_scale);
    if (o.num_sms < 0) return error("num_sms %d is negative", o.num_sms);
    if (o.tiles_per_shift < 0)
        return error("tiles_per_shift %d is negative", o.tiles_per_shift);
    return distflash_check_device();
}

bool empty(const distflash_block& b) { return b.batch == 0 || b.q_heads == 0 || b.q_len == 0; }

// ---------------------------------------------------------------- tensor maps

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time so that the library needs no libcuda to load.
EncodeTiled encoder() {
    static const EncodeTiled function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t code = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        return code == cudaSuccess && result == cudaDriverEntryPointSuccess
                   ? reinterpret_cast<EncodeTiled>(entry)
                   : nullptr;
    }();
    return function;
}

// A map of boxes of box_rows rows x 128 bytes of one head.
const char* make_tensor_map(CUtensorMap* map, const char* name, const distflash_tensor& t,
                            int dtype, int head_dim, int seq, int heads, int batch, int box_rows) {
    const int size = dtype == DISTFLASH_FP32 ? 4 : 2;
    DISTFLASH_TRY(check_tensor(name, t, 16 / size));
    if (encoder() == nullptr)
        return "the CUDA driver has no cuTensorMapEncodeTiled; update the driver";
    const auto bytes = [&](int extent, int64_t stride) {  // of an extent of 1 nothing is used
        return cuuint64_t(extent > 1 ? stride * size : head_dim * size);
    };
    const cuuint64_t extent[4] = {cuuint64_t(head_dim), cuuint64_t(seq), cuuint64_t(heads),
                                  cuuint64_t(batch)};
    const cuuint64_t stride[3] = {bytes(seq, t.seq_stride), bytes(heads, t.head_stride),
                                  bytes(batch, t.batch_stride)};
    const cuuint32_t box[4] = {cuuint32_t(128 / size), cuuint32_t(box_rows), 1, 1};
    const cuuint32_t step[4] = {1, 1, 1, 1};
    const auto type = dtype == DISTFLASH_BF16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                      : dtype == DISTFLASH_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const CUresult code =
        encoder()(map, type, 4, t.data, extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code == CUDA_SUCCESS) return nullptr;
    return error("no tensor map for %s of (batch %d, heads %d, seq %d, d %d), strides (%lld, %lld, "
                 "%lld): CUDA error %d", name, batch, heads, seq, head_dim,
                 static_cast<long long>(t.batch_stride), static_cast<long long>(t.head_stride),
                 static_cast<long long>(t.seq_stride), int(code));
}

Strides3 strides(const distflash_tensor& t) {
    return {t.batch_stride, t.head_stride, t.seq_stride};
}
Strides3 strides(const distflash_rows& t) { return {t.batch_stride, t.head_stride, t.seq_stride}; }

int clamp_far(int64_t x) { return int(x < -kFar ? -kFar : x > kFar ? kFar : x); }

Band band(const distflash_block& b) {
    Band band = {b.k_len, -kFar, kFar};
    if (b.mask != DISTFLASH_MASK_FULL) band.right = clamp_far(b.offset);
    if (b.mask == DISTFLASH_MASK_WINDOW) band.left = clamp_far(b.offset - b.window + 1);
    return band;
}

// ---------------------------------------------------------------- launches

// Counters of the tile schedulers. A launch takes the next one; the kernel leaves it at zero, so
// that it serves again when no launch of so long ago can still be running.
constexpr int kCounters = 4096;
__device__ TileCounter tile_counters[kCounters];

const char* next_counter(TileCounter** counter) {
    static std::atomic<unsigned> next{0};
    void* base = nullptr;
    DISTFLASH_TRY(check(cudaGetSymbolAddress(&base, tile_counters), "finding the tile counters"));
    *counter = static_cast<TileCounter*>(base) + next.fetch_add(1) % kCounters;
    return nullptr;
}

const char* usable_multiprocessors(const distflash_options& options, int* count) {
    int device = 0;
    DISTFLASH_TRY(check(cudaGetDevice(&device), "finding the current device"));
    DISTFLASH_TRY(check(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device),
                        "counting multiprocessors"));
    if (options.num_sms > 0 && options.num_sms < *count) *count = options.num_sms;
    return nullptr;
}

// Blocks stay for all their tiles, one to a multiprocessor; or they leave after `shift` tiles, the
// first ones after 1, 2 ... shift, 1 ... so that their ends are spread from the beginning. Then
// others follow, as many as take all tiles; and further ones, so that none of the multiprocessors
// is idle while others' shifts last: it finds the next block, or all tiles taken.
int lay_out_grid(TileSchedule& schedule, int num_tiles, int multiprocessors, int shift) {
    if (shift > num_tiles) shift = num_tiles;
    const int first = num_tiles < multiprocessors ? num_tiles : multiprocessors;
    schedule.first_blocks = shift > 0 ? first : 0;
    schedule.shift = shift > 0 ? shift : INT32_MAX;
    if (shift == 0) return first;
    const int64_t rounds = first / shift, rest = first % shift;
    const int64_t taken = rounds * shift * (shift + 1) / 2 + rest * (rest + 1) / 2;
    const int64_t later = taken < num_tiles ? (num_tiles - taken + shift - 1) / shift : 0;
    const int64_t blocks = first + later + first - 1;
    return int(blocks < num_tiles ? blocks : num_tiles);  // each can take one tile at least
}

template <typename Params>
const char* launch(const Kernel& kernel, Params& params, int64_t num_tiles, int multiprocessors,
                   const distflash_options& options, cudaStream_t stream) {
    if (num_tiles == 0) return nullptr;
    if (num_tiles >= INT32_MAX / 2) return "too many tiles in one call; split the task list";
    params.num_tiles = int(num_tiles);
    params.scale = options.softmax_scale;
    params.scale_log2 = float(options.softmax_scale * 1.4426950408889634);
    DISTFLASH_TRY(next_counter(&params.schedule.counter));
    const int blocks = lay_out_grid(params.schedule, params.num_tiles, multiprocessors,
                                    options.tiles_per_shift);
    DISTFLASH_TRY(check(cudaFuncSetAttribute(kernel.function,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             kernel.shared_bytes),
                        "raising the shared-memory limit"));
    void* arguments[] = {&params};
    return check(cudaLaunchKernel(kernel.function, dim3(blocks), dim3(kernel.threads), arguments,
                                  kernel.shared_bytes, stream),
                 "the launch of attention");
}

using KernelOf = Kernel (*)(int dtype, bool masked);

KernelOf forward_kernel_of(int head_dim) {
    switch (head_dim) {
        case 64: return forward_kernel_d64;
        case 96: return forward_kernel_d96;
        case 128: return forward_kernel_d128;
        case 192: return forward_kernel_d192;
        case 256: return forward_kernel_d256;
        default: return nullptr;
    }
}

KernelOf backward_kernel_of(int head_dim) {
    switch (head_dim) {
        case 64: return backward_kernel_d64;
        case 96: return backward_kernel_d96;
        case 128: return backward_kernel_d128;
        case 192: return backward_kernel_d192;
        case 256: return backward_kernel_d256;
        default: return nullptr;
    }
}

template <typename Task>
bool any_masked(const Task* tasks, int num_tasks) {
    for (int i = 0; i < num_tasks; ++i)
        if (tasks[i].block.mask != DISTFLASH_MASK_FULL) return true;
    return false;
}

// What the heads in work at one time may occupy of the L2 cache, for each multiprocessor that works
// on them: processes that share a GPU share its cache. Of a whole GPU it is half of the cache.
constexpr int64_t kCacheShare = (24 << 20) / 132;

int section_heads(int64_t wanted, int at_least, int at_most) {
    const int64_t heads = wanted < at_least ? at_least : wanted;
    return int(heads < at_most ? heads : at_most);
}

// ---------------------------------------------------------------- forward lists

bool same(const distflash_tensor& a, const distflash_tensor& b) {
    return a.data == b.data && a.batch_stride == b.batch_stride &&
           a.head_stride == b.head_stride && a.seq_stride == b.seq_stride;
}

bool same_range(const distflash_forward_task& a, const distflash_forward_task& b) {
    return same(a.q, b.q) && same(a.out, b.out) && same(a.out_acc, b.out_acc) &&
           a.lse.data == b.lse.data && a.block.batch == b.block.batch &&
           a.block.q_heads == b.block.q_heads && a.block.kv_heads == b.block.kv_heads &&
           a.block.q_len == b.block.q_len;
}

// Collects tasks into parameters and launches when they are full.
class ForwardList {
  public:
    ForwardList(const Kernel& kernel, int multiprocessors, const distflash_options& options,
                cudaStream_t stream)
        : kernel_(kernel),
          multiprocessors_(multiprocessors),
          options_(options),
          stream_(stream) {}

    const char* add(const distflash_forward_task& task, const distflash_forward_task* previous) {
        bool continues = previous != nullptr && same_range(task, *previous);
        if (num_segments_ == kMaxSegments) {
            DISTFLASH_TRY(flush(continues));
            if (continues) {  // the rest of a split range merges with what its first part left
                DISTFLASH_TRY(open_range(task));
                params_.range[0].accumulate = 1;
            }
        }
        if (!continues) DISTFLASH_TRY(open_range(task));
        return add_segment(task);
    }

    // Launches what was collected. `continued`: the last range goes on in another launch.
    const char* flush(bool continued) {
        if (num_ranges_ == 0) return nullptr;
        QueryRange& last = params_.range[num_ranges_ - 1];
        if (continued) {
            if (last.out_acc == nullptr)
                return error("a query range with more than %d tasks needs out_acc", kMaxSegments);
            last.out = nullptr;
        }
        int64_t num_tiles = 0;
        for (int i = 0; i < num_ranges_; ++i) num_tiles += finish(params_.range[i]);
        num_ranges_ = num_segments_ = 0;
        return launch(kernel_, params_, num_tiles, multiprocessors_, options_, stream_);
    }

  private:
    const char* open_range(const distflash_forward_task& task) {
        const distflash_block& b = task.block;
        QueryRange& range = params_.range[num_ranges_++];
        DISTFLASH_TRY(make_tensor_map(&range.q, "q", task.q, options_.dtype, options_.head_dim,
                                      b.q_len, b.q_heads, b.batch, kernel_.row_box));
        if (task.out_acc.data == nullptr && (task.out.data == nullptr || task.accumulate))
            return "out_acc is a null pointer";
        if (task.out_acc.data) DISTFLASH_TRY(check_tensor("out_acc", task.out_acc, 4));
        if (task.out.data) DISTFLASH_TRY(check_tensor("out", task.out, 8));
        if (task.lse.data == nullptr) return "lse is a null pointer";
        range.out_acc = static_cast<float*>(task.out_acc.data);
        range.out = task.out.data;
        range.lse = task.lse.data;
        range.out_acc_stride = strides(task.out_acc);
        range.out_stride = strides(task.out);
        range.lse_stride = strides(task.lse);
        range.q_heads = b.q_heads;
        range.heads_per_kv = b.q_heads / b.kv_heads;
        range.batch_heads = b.batch * b.q_heads;
        range.q_len = b.q_len;
        range.num_q_tiles = (b.q_len + kernel_.rows - 1) / kernel_.rows;
        range.first_segment = num_segments_;
        range.num_segments = 0;
        range.accumulate = task.accumulate;
        return nullptr;
    }

    const char* add_segment(const distflash_forward_task& task) {
        const distflash_block& b = task.block;
        KeySegment& segment = params_.segment[num_segments_++];
        ++params_.range[num_ranges_ - 1].num_segments;
        segment.band = band(b);
        // Of no keys nothing is read but the one masked tile that keeps the pipeline going.
        const bool none = b.k_len == 0;
        const distflash_tensor& k = none ? task.q : task.k;
        const distflash_tensor& v = none ? task.q : task.v;
        const int rows = none ? 1 : b.k_len;
        DISTFLASH_TRY(make_tensor_map(&segment.k, "k", k, options_.dtype, options_.head_dim, rows,
                                      b.kv_heads, b.batch, kernel_.keys));
        return make_tensor_map(&segment.v, "v", v, options_.dtype, options_.head_dim, rows,
                               b.kv_heads, b.batch, kernel_.keys);
    }

    int64_t finish(QueryRange& range) {
        int64_t keys = 1;
        for (int i = 0; i < range.num_segments; ++i)
            keys += params_.segment[range.first_segment + i].band.k_len;
        const int64_t head_bytes = keys * options_.head_dim * 4;  // K and V
        const int64_t kv_heads = kCacheShare * multiprocessors_ / head_bytes;
        range.section_heads = section_heads(kv_heads * range.heads_per_kv, range.heads_per_kv,
                                            range.batch_heads);
        const int64_t tiles = int64_t(range.batch_heads) * range.num_q_tiles;
        range.num_tiles = int(tiles < INT32_MAX ? tiles : INT32_MAX);
        return tiles;
    }

    const Kernel kernel_;
    const int multiprocessors_;
    const distflash_options& options_;
    const cudaStream_t stream_;
    ForwardParams params_;
    int num_ranges_ = 0, num_segments_ = 0;
};

// ---------------------------------------------------------------- backward lists

// Collects tasks into parameters and launches when they are full; deterministic ones go one task
// a launch, with counters that order the additions inside it.
class BackwardList {
  public:
    BackwardList(const Kernel& kernel, int multiprocessors, const distflash_options& options,
                 cudaStream_t stream)
        : kernel_(kernel),
          multiprocessors_(multiprocessors),
          options_(options),
          stream_(stream) {}

    const char* add(const distflash_backward_task& task) {
        DISTFLASH_TRY(describe(params_.task[num_tasks_], task));
        ++num_tasks_;
        if (options_.deterministic) return flush_ordered();
        return num_tasks_ == kMaxSegments ? flush() : nullptr;
    }

    const char* flush() {
        int64_t num_units = 0;
        for (int i = 0; i < num_tasks_; ++i) num_units += params_.task[i].num_tiles;
        if (num_units == 0) return nullptr;
        const int64_t num_tiles = cut_last_round(num_units);
        num_tasks_ = 0;
        return launch(kernel_, params_, num_tiles, multiprocessors_, options_, stream_);
    }

  private:
    // The last round of units would leave most multiprocessors idle. Its units are cut along the
    // queries into as many pieces as end soonest; a piece costs about two query tiles more than its
    // share. (Under a mask the last units are the smallest, and deterministic sums have one order.)
    int64_t cut_last_round(int64_t num_units) {
        const BackwardTaskParams& last = params_.task[num_tasks_ - 1];
        params_.whole_units = int(num_units < INT32_MAX ? num_units : INT32_MAX);
        params_.pieces = 1;
        const int64_t rest = num_units % multiprocessors_;
        const bool masked = last.band.left != -kFar || last.band.right != kFar;
        if (options_.deterministic || masked || rest > last.num_tiles) return num_units;
        double best = last.num_q_tiles;
        for (int pieces = 2; pieces <= last.num_q_tiles / 4 && pieces <= 32; ++pieces) {
            const int64_t rounds = (rest * pieces + multiprocessors_ - 1) / multiprocessors_;
            const double time = rounds * (double(last.num_q_tiles) / pieces + 2);
            if (time >= best) continue;
            best = time;
            params_.pieces = pieces;
        }
        params_.whole_units -= int(rest);
        return num_units + rest * (params_.pieces - 1);
    }

    const char* describe(BackwardTaskParams& p, const distflash_backward_task& task) {
        const distflash_block& b = task.block;
        const auto map = [&](CUtensorMap* to, const char* name, const distflash_tensor& t, int seq,
                             int heads, int rows) {
            return make_tensor_map(to, name, t, options_.dtype, options_.head_dim, seq, heads,
                                   b.batch, rows);
        };
        DISTFLASH_TRY(map(&p.q, "q", task.q, b.q_len, b.q_heads, kernel_.row_box));
        DISTFLASH_TRY(map(&p.dout, "dout", task.dout, b.q_len, b.q_heads, kernel_.row_box));
        DISTFLASH_TRY(map(&p.k, "k", task.k, b.k_len, b.kv_heads, kernel_.keys));
        DISTFLASH_TRY(map(&p.v, "v", task.v, b.k_len, b.kv_heads, kernel_.keys));
        DISTFLASH_TRY(make_tensor_map(&p.dq_add, "dq", task.dq, DISTFLASH_FP32,
                                      options_.head_dim, b.q_len, b.q_heads, b.batch,
                                      kernel_.add_box));
        DISTFLASH_TRY(check_tensor("dk", task.dk, 4));
        DISTFLASH_TRY(check_tensor("dv", task.dv, 4));
        if (task.lse.data == nullptr) return "lse is a null pointer";
        if (task.delta.data == nullptr) return "delta is a null pointer";
        p.lse = task.lse.data;
        p.delta = task.delta.data;
        p.dq = static_cast<float*>(task.dq.data);
        p.dk = static_cast<float*>(task.dk.data);
        p.dv = static_cast<float*>(task.dv.data);
        p.dq_order = p.dkv_order = nullptr;
        p.descending = options_.deterministic != 0;
        p.lse_stride = strides(task.lse);
        p.delta_stride = strides(task.delta);
        p.dq_stride = strides(task.dq);
        p.dk_stride = strides(task.dk);
        p.dv_stride = strides(task.dv);
        p.band = band(b);
        p.q_heads = b.q_heads;
        p.heads_per_kv = b.q_heads / b.kv_heads;
        p.batch_heads = b.batch * b.q_heads;
        p.q_len = b.q_len;
        p.num_q_tiles = (b.q_len + kernel_.rows - 1) / kernel_.rows;
        p.num_k_tiles = (b.k_len + kernel_.keys - 1) / kernel_.keys;
        const int64_t head_bytes = int64_t(b.q_len) * options_.head_dim * 8;  // Q, dO, fp32 dQ
        p.section_heads =
            section_heads(kCacheShare * multiprocessors_ / head_bytes, 1, p.batch_heads);
        const int64_t tiles = int64_t(p.batch_heads) * p.num_k_tiles;
        if (tiles >= INT32_MAX) return "too many key tiles in one task; split it";
        p.num_tiles = int(tiles);
        p.early_tiles = early_tiles(p);
        return nullptr;
    }

    // While the last of the long tiles run, the other multiprocessors want work for about half as
    // long. Of a triangle the share x with the shortest tiles is x^2 of the work, which is
    // num_tiles / 2 of the longest tiles: hence x.
    int early_tiles(const BackwardTaskParams& p) const {
        const bool causal = p.band.left == -kFar && p.band.right != kFar;
        if (!causal || options_.deterministic) return p.num_k_tiles;
        const double late = std::sqrt(double(multiprocessors_) / p.num_tiles);
        return late < 1.0 ? int((1.0 - late) * p.num_k_tiles) : 0;
    }

    // Counters come from the stream's memory pool and go back to it after the launch.
    const char* flush_ordered() {
        BackwardTaskParams& p = params_.task[0];
        const size_t num_dq = size_t(p.batch_heads) * p.num_q_tiles * kOrderCounters;
        const size_t num_dkv =
            size_t(p.batch_heads / p.heads_per_kv) * p.num_k_tiles * kOrderCounters;
        const size_t bytes = (num_dq + num_dkv) * sizeof(int);
        void* counters = nullptr;
        DISTFLASH_TRY(check(cudaMallocAsync(&counters, bytes, stream_),
                            "allocating the order counters"));
        DISTFLASH_TRY(check(cudaMemsetAsync(counters, 0, bytes, stream_),
                            "zeroing the order counters"));
        p.dq_order = static_cast<int*>(counters);
        p.dkv_order = p.dq_order + num_dq;
        const char* message = flush();
        const char* freed = check(cudaFreeAsync(counters, stream_), "freeing the order counters");
        return message != nullptr ? message : freed;
    }

    const Kernel kernel_;
    const int multiprocessors_;
    const distflash_options& options_;
    const cudaStream_t stream_;
    BackwardParams params_;
    int num_tasks_ = 0;
};

}  // namespace
}  // namespace distflash

using namespace distflash;

extern "C" {

int distflash_api_version(void) { return DISTFLASH_API_VERSION; }

const char* distflash_check_device(void) {
    int device = 0, major = 0, minor = 0;
    DISTFLASH_TRY(check(cudaGetDevice(&device), "finding the current device"));
    DISTFLASH_TRY(check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                        "reading the compute capability"));
    DISTFLASH_TRY(check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                        "reading the compute capability"));
    if (major == 9 && minor == 0) return nullptr;
    return error("the kernels are for compute capability 9.0 (H100, H200); device %d has %d.%d",
                 device, major, minor);
}

const char* distflash_forward(const distflash_forward_task* tasks, int32_t num_tasks,
                              const distflash_options* options, distflash_stream stream) {
    DISTFLASH_TRY(check_options(*options));
    const KernelOf kernel_of = forward_kernel_of(options->head_dim);
    if (kernel_of == nullptr)
        return error("head_dim %d is not supported; use 64, 96, 128, 192 or 256",
                     options->head_dim);
    for (int i = 0; i < num_tasks; ++i) DISTFLASH_TRY(check_block(tasks[i].block, i));
    int multiprocessors = 0;
    DISTFLASH_TRY(usable_multiprocessors(*options, &multiprocessors));
    ForwardList list(kernel_of(options->dtype, any_masked(tasks, num_tasks)), multiprocessors,
                     *options, cudaStream_t(stream));
    const distflash_forward_task* previous = nullptr;
    for (int i = 0; i < num_tasks; ++i) {
        if (empty(tasks[i].block)) continue;
        DISTFLASH_TRY(list.add(tasks[i], previous));
        previous = &tasks[i];
    }
    return list.flush(false);
}

const char* distflash_backward(const distflash_backward_task* tasks, int32_t num_tasks,
                               const distflash_options* options, distflash_stream stream) {
    DISTFLASH_TRY(check_options(*options));
    const KernelOf kernel_of = backward_kernel_of(options->head_dim);
    if (kernel_of == nullptr)
        return error("head_dim %d is not supported; use 64, 96, 128, 192 or 256",
                     options->head_dim);
    for (int i = 0; i < num_tasks; ++i) DISTFLASH_TRY(check_block(tasks[i].block, i));
    int multiprocessors = 0;
    DISTFLASH_TRY(usable_multiprocessors(*options, &multiprocessors));
    BackwardList list(kernel_of(options->dtype, any_masked(tasks, num_tasks)), multiprocessors,
                      *options, cudaStream_t(stream));
    for (int i = 0; i < num_tasks; ++i)
        if (!empty(tasks[i].block) && tasks[i].block.k_len > 0)
            DISTFLASH_TRY(list.add(tasks[i]));
    return list.flush();
}

}  // extern "C"
