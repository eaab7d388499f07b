// Row kernels, used with every attention backend: merge of a partial into the state, delta and the
// output that stands in for it, fp32 accumulation and the cast to 16 bit.
//
// All are bound by memory. One thread handles 8 consecutive elements of one row (one 16-byte
// access of a 16-bit tensor, two of an fp32 one); a row is a power of two of lanes, so that it
// never leaves its warp and its LSE is read by all lanes before one of them writes it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>
#include <utility>

#include "api.h"
#include "host.h"

namespace distflash {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // per thread

// ---------------------------------------------------------------- rows and their addresses

// The three row dimensions, innermost in memory first, so that neighbouring warps touch
// neighbouring memory whatever the layout. Indexed [innermost, middle, outermost].
struct Rows {
    int32_t extent[3];
    int64_t num_rows;
    int32_t lanes_log2;  // lanes per row
    int32_t chunks;      // lanes with data: head_dim / 8
};

struct Strides {
    int64_t stride[3];  // elements, same order as Rows::extent
};

struct Cell {
    int32_t idx[3];
    int32_t chunk;
    bool valid_row, valid;
};

__device__ inline Cell locate(const Rows& rows) {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = thread >> rows.lanes_log2;
    Cell cell;
    cell.chunk = int(thread) & ((1 << rows.lanes_log2) - 1);
    cell.valid_row = row < rows.num_rows;
    cell.valid = cell.valid_row && cell.chunk < rows.chunks;
    const uint32_t r = cell.valid_row ? uint32_t(row) : 0;
    const uint32_t outer = r / uint32_t(rows.extent[0]);
    cell.idx[0] = int(r - outer * uint32_t(rows.extent[0]));
    cell.idx[2] = int(outer / uint32_t(rows.extent[1]));
    cell.idx[1] = int(outer - uint32_t(cell.idx[2]) * uint32_t(rows.extent[1]));
    return cell;
}

__device__ inline int64_t offset(const Cell& cell, const Strides& s) {
    return cell.idx[0] * s.stride[0] + cell.idx[1] * s.stride[1] + cell.idx[2] * s.stride[2];
}

// ---------------------------------------------------------------- 8 elements at a time

__device__ inline void load8(float (&x)[8], const float* p) {
    const float4 a = *reinterpret_cast<const float4*>(p);
    const float4 b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

template <typename T>
__device__ inline void load8(float (&x)[8], const T* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const T* t = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = float(t[i]);
}

__device__ inline void store8(float* p, const float (&x)[8]) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

template <typename T>
__device__ inline void store8(T* p, const float (&x)[8]) {
    uint4 raw;
    T* t = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = T(x[i]);
    *reinterpret_cast<uint4*>(p) = raw;
}

// ---------------------------------------------------------------- kernels

// The result goes to acc, or, if kFinish, to out alone.
template <bool kFinish, typename T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(Rows rows, float* acc, Strides acc_s, float* acc_lse, Strides acc_lse_s,
                 const T* o, Strides o_s, const float* o_lse, Strides o_lse_s, T* out,
                 Strides out_s) {
    const Cell cell = locate(rows);
    float old_lse = -INFINITY, new_lse = -INFINITY;
    float* lse_at = acc_lse + offset(cell, acc_lse_s);
    if (cell.valid_row) {
        old_lse = *lse_at;
        new_lse = o_lse[offset(cell, o_lse_s)];
    }
    __syncwarp();  // every lane of the row has read the LSE before one of them writes it
    if (!cell.valid) return;
    const bool some_old = old_lse != -INFINITY, some_new = new_lse != -INFINITY;
    if (!kFinish && !some_new) return;  // the state stays untouched

    const float top = some_old || some_new ? fmaxf(old_lse, new_lse) : 0.f;
    const float old_share = __expf(old_lse - top), new_share = __expf(new_lse - top);
    const float sum = old_share + new_share;
    const float inv = sum > 0.f ? 1.f / sum : 0.f;
    const float old_weight = old_share * inv, new_weight = new_share * inv;

    float x[8] = {}, y[8] = {};
    float* at = acc + offset(cell, acc_s) + cell.chunk * kElements;
    if (some_new) load8(y, o + offset(cell, o_s) + cell.chunk * kElements);
    if (some_old) load8(x, at);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * old_weight + y[i] * new_weight;
    if constexpr (kFinish)
        store8(out + offset(cell, out_s) + cell.chunk * kElements, x);
    else
        store8(at, x);
    if (cell.chunk == 0 && some_new) *lse_at = top + __logf(sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(Rows rows, const T* o, Strides o_s, const T* dout, Strides dout_s, float* delta,
                 Strides delta_s) {
    const Cell cell = locate(rows);
    float sum = 0.f;
    if (cell.valid) {
        float x[8], y[8];
        load8(x, o + offset(cell, o_s) + cell.chunk * kElements);
        load8(y, dout + offset(cell, dout_s) + cell.chunk * kElements);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
    }
    for (int lane = 1 << rows.lanes_log2 >> 1; lane > 0; lane >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (cell.valid_row && cell.chunk == 0) delta[offset(cell, delta_s)] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    stand_in_kernel(Rows rows, const T* dout, Strides dout_s, const float* delta, Strides delta_s,
                    T* out, Strides out_s) {
    const Cell cell = locate(rows);
    float x[8] = {}, largest = 0.f, square = 0.f;
    if (cell.valid) {
        load8(x, dout + offset(cell, dout_s) + cell.chunk * kElements);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
    }
    for (int lane = 1 << rows.lanes_log2 >> 1; lane > 0; lane >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    const bool nothing = largest == 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // squares of what is at most 1 neither under- nor overflow
        x[i] = nothing ? 0.f : x[i] / largest;
        square += x[i] * x[i];
    }
    for (int lane = 1 << rows.lanes_log2 >> 1; lane > 0; lane >>= 1)
        square += __shfl_xor_sync(0xffffffffu, square, lane);
    if (!cell.valid) return;
    const float ratio = nothing ? 0.f : delta[offset(cell, delta_s)] / largest / square;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= ratio;
    store8(out + offset(cell, out_s) + cell.chunk * kElements, x);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(Rows rows, float* acc, Strides acc_s, const T* x, Strides x_s) {
    const Cell cell = locate(rows);
    if (!cell.valid) return;
    float a[8], b[8];
    float* at = acc + offset(cell, acc_s) + cell.chunk * kElements;
    load8(a, at);
    load8(b, x + offset(cell, x_s) + cell.chunk * kElements);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] += b[i];
    store8(at, a);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(Rows rows, T* out, Strides out_s, const float* acc, Strides acc_s) {
    const Cell cell = locate(rows);
    if (!cell.valid) return;
    float a[8];
    load8(a, acc + offset(cell, acc_s) + cell.chunk * kElements);
    store8(out + offset(cell, out_s) + cell.chunk * kElements, a);
}

// ---------------------------------------------------------------- host side

// Row dimensions ordered by the strides of `lead`, the tensor with the most traffic.
struct Layout {
    Rows rows;
    int order[3];  // position in (batch, head, seq) of each Rows dimension
};

const char* make_layout(Layout* layout, const distflash_shape& shape,
                        const distflash_tensor& lead) {
    if (shape.batch < 0 || shape.heads < 0 || shape.seq < 0)
        return error("shape (%d, %d, %d) has a negative extent", shape.batch, shape.heads,
                     shape.seq);
    if (shape.head_dim < 8 || shape.head_dim > 256 || shape.head_dim % 8)
        return error("head_dim %d is not a multiple of 8 in 8..256", shape.head_dim);
    const int32_t extent[3] = {shape.batch, shape.heads, shape.seq};
    const int64_t stride[3] = {lead.batch_stride, lead.head_stride, lead.seq_stride};
    int* order = layout->order;
    order[0] = 2, order[1] = 1, order[2] = 0;
    for (int pass = 0; pass < 2; ++pass)  // sort three by stride; extent-1 dimensions go last
        for (int i = 0; i < 2; ++i) {
            const auto key = [&](int d) { return extent[d] > 1 ? stride[d] : INT64_MAX; };
            if (key(order[i]) > key(order[i + 1])) std::swap(order[i], order[i + 1]);
        }
    Rows& rows = layout->rows;
    rows.num_rows = 1;
    for (int i = 0; i < 3; ++i) {
        rows.extent[i] = extent[order[i]];
        rows.num_rows *= extent[order[i]];
    }
    if (rows.num_rows >= INT64_C(1) << 31)
        return error("%lld rows in one call; at most 2^31 - 1 are supported",
                     static_cast<long long>(rows.num_rows));
    rows.chunks = shape.head_dim / kElements;
    rows.lanes_log2 = 0;
    while ((1 << rows.lanes_log2) < rows.chunks) ++rows.lanes_log2;
    return nullptr;
}

Strides permute(const Layout& layout, int64_t batch, int64_t head, int64_t seq) {
    const int64_t stride[3] = {batch, head, seq};
    Strides s;
    for (int i = 0; i < 3; ++i) s.stride[i] = stride[layout.order[i]];
    return s;
}

template <typename V>
Strides strides(const Layout& layout, const V& view) {
    return permute(layout, view.batch_stride, view.head_stride, view.seq_stride);
}

const char* check_aligned(const char* name, const distflash_tensor& t, int32_t dtype) {
    const int64_t unit = dtype == DISTFLASH_FP32 ? 4 : 8;
    if (t.data == nullptr) return error("%s is a null pointer", name);
    if (reinterpret_cast<uintptr_t>(t.data) % 16 || t.batch_stride % unit ||
        t.head_stride % unit || t.seq_stride % unit)
        return error("%s must be 16-byte aligned with strides that are multiples of %d elements; "
                     "make it contiguous", name, int(unit));
    return nullptr;
}

unsigned num_blocks(const Rows& rows) {
    return unsigned(((rows.num_rows << rows.lanes_log2) + kThreads - 1) / kThreads);
}

// Calls f with a null pointer of the element type that `dtype` names.
template <typename F>
const char* dispatch(int32_t dtype, bool allow_fp32, F&& f) {
    if (dtype == DISTFLASH_BF16) return f(static_cast<__nv_bfloat16*>(nullptr));
    if (dtype == DISTFLASH_FP16) return f(static_cast<__half*>(nullptr));
    if constexpr (std::is_invocable_v<F, float*>) {
        if (dtype == DISTFLASH_FP32 && allow_fp32) return f(static_cast<float*>(nullptr));
    }
    return error("dtype %d is not supported here", int(dtype));
}

}  // namespace
}  // namespace distflash

using namespace distflash;

#define DISTFLASH_TRY(expr) \
    if (const char* message = (expr)) return message

extern "C" {

const char* distflash_merge(const distflash_shape* shape, const distflash_tensor* acc,
                            const distflash_rows* acc_lse, const distflash_tensor* o,
                            const distflash_rows* o_lse, int32_t dtype, distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *acc));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("acc", *acc, DISTFLASH_FP32));
    DISTFLASH_TRY(check_aligned("o", *o, dtype));
    return dispatch(dtype, true, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        merge_kernel<false, T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<float*>(acc->data), strides(layout, *acc), acc_lse->data,
            strides(layout, *acc_lse), static_cast<const T*>(o->data), strides(layout, *o),
            o_lse->data, strides(layout, *o_lse), nullptr, Strides{});
        return check(cudaGetLastError(), "the launch of merge");
    });
}

const char* distflash_finish(const distflash_shape* shape, const distflash_tensor* acc,
                             const distflash_rows* acc_lse, const distflash_tensor* o,
                             const distflash_rows* o_lse, const distflash_tensor* out,
                             int32_t dtype, distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *acc));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("acc", *acc, DISTFLASH_FP32));
    DISTFLASH_TRY(check_aligned("o", *o, dtype));
    DISTFLASH_TRY(check_aligned("out", *out, dtype));
    return dispatch(dtype, false, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        merge_kernel<true, T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<float*>(acc->data), strides(layout, *acc), acc_lse->data,
            strides(layout, *acc_lse), static_cast<const T*>(o->data), strides(layout, *o),
            o_lse->data, strides(layout, *o_lse), static_cast<T*>(out->data),
            strides(layout, *out));
        return check(cudaGetLastError(), "the launch of finish");
    });
}

const char* distflash_delta(const distflash_shape* shape, const distflash_tensor* o,
                            const distflash_tensor* dout, const distflash_rows* delta,
                            int32_t dtype, distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *o));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("o", *o, dtype));
    DISTFLASH_TRY(check_aligned("dout", *dout, dtype));
    return dispatch(dtype, true, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        delta_kernel<T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<const T*>(o->data), strides(layout, *o),
            static_cast<const T*>(dout->data), strides(layout, *dout), delta->data,
            strides(layout, *delta));
        return check(cudaGetLastError(), "the launch of delta");
    });
}

const char* distflash_stand_in(const distflash_shape* shape, const distflash_tensor* dout,
                               const distflash_rows* delta, const distflash_tensor* out,
                               int32_t dtype, distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *dout));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("dout", *dout, dtype));
    DISTFLASH_TRY(check_aligned("out", *out, dtype));
    return dispatch(dtype, true, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        stand_in_kernel<T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<const T*>(dout->data), strides(layout, *dout), delta->data,
            strides(layout, *delta), static_cast<T*>(out->data), strides(layout, *out));
        return check(cudaGetLastError(), "the launch of stand_in");
    });
}

const char* distflash_accumulate(const distflash_shape* shape, const distflash_tensor* acc,
                                 const distflash_tensor* x, int32_t dtype,
                                 distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *acc));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("acc", *acc, DISTFLASH_FP32));
    DISTFLASH_TRY(check_aligned("x", *x, dtype));
    return dispatch(dtype, true, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        accumulate_kernel<T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<float*>(acc->data), strides(layout, *acc),
            static_cast<const T*>(x->data), strides(layout, *x));
        return check(cudaGetLastError(), "the launch of accumulate");
    });
}

const char* distflash_cast(const distflash_shape* shape, const distflash_tensor* out,
                           const distflash_tensor* acc, int32_t dtype, distflash_stream stream) {
    Layout layout;
    DISTFLASH_TRY(make_layout(&layout, *shape, *acc));
    if (layout.rows.num_rows == 0) return nullptr;
    DISTFLASH_TRY(check_aligned("acc", *acc, DISTFLASH_FP32));
    DISTFLASH_TRY(check_aligned("out", *out, dtype));
    return dispatch(dtype, false, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        cast_kernel<T><<<num_blocks(layout.rows), kThreads, 0, cudaStream_t(stream)>>>(
            layout.rows, static_cast<T*>(out->data), strides(layout, *out),
            static_cast<const float*>(acc->data), strides(layout, *acc));
        return check(cudaGetLastError(), "the launch of cast");
    });
}

}  // extern "C"
