// Plain-C interface of the Hopper attention kernels: raw device pointers, strides, a stream.
// No torch, no C++ types; cpp/ includes this header and Python reaches it through ctypes.
//
// Vocabulary: a *task* is one attention block (query range x key range x head range with a
// mask). The caller offsets the pointers to the first element of each range, so a task holds
// lengths only. The *state* of a query row is (out_acc fp32, lse fp32): the normalised output
// and natural-log-sum-exp over all keys seen so far; a row that saw no key has lse = -inf.
//
// Every function returns NULL on success, or a static or thread-local English sentence that
// says what is wrong. Launches are asynchronous on `stream`, never synchronise, and can be
// captured in a CUDA graph; only the deterministic backward allocates (order counters, from the
// stream's memory pool).
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DISTFLASH_API_VERSION 3

typedef void* distflash_stream;  // a cudaStream_t

typedef enum {
    DISTFLASH_BF16 = 0,
    DISTFLASH_FP16 = 1,
    DISTFLASH_FP32 = 2,
} distflash_dtype;

typedef enum {
    DISTFLASH_MASK_FULL = 0,    // every query sees every key
    DISTFLASH_MASK_CAUSAL = 1,  // query i sees key j iff j <= i + offset
    DISTFLASH_MASK_WINDOW = 2,  // causal, and j > i + offset - window
} distflash_mask;

// A (batch, head, sequence, d) view of device memory. Strides are in elements; d is contiguous.
// Tensors of 16-bit numbers need 16-byte aligned data and strides that are multiples of 8.
typedef struct {
    void* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t seq_stride;
} distflash_tensor;

// A (batch, head, sequence) view of fp32 device memory: LSE and delta.
typedef struct {
    float* data;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t seq_stride;
} distflash_rows;

// Lengths and mask of one attention block. i and j in the mask count from the first row of the
// task's own ranges: offset = (position of query 0) - (position of key 0) in the sequence.
typedef struct {
    int32_t batch;
    int32_t q_heads;   // a multiple of kv_heads; query head h reads KV head h / (q_heads/kv_heads)
    int32_t kv_heads;
    int32_t q_len;
    int32_t k_len;
    int32_t mask;      // distflash_mask
    int64_t offset;    // CAUSAL, WINDOW
    int64_t window;    // WINDOW: number of keys a query sees at most (>= 1)
} distflash_block;

// Forward: out = softmax(scale * q k^T + mask) v over this task's keys, merged into the state.
typedef struct {
    distflash_block block;
    distflash_tensor q, k, v;     // 16-bit, all of one dtype
    distflash_tensor out_acc;     // fp32 state; data may be NULL if out.data is given and
                                  // accumulate is 0
    distflash_tensor out;         // 16-bit; if data is given, the merged result goes here and
                                  // not to out_acc (the last task of a query range)
    distflash_rows lse;           // state: read if accumulate, always written
    int32_t accumulate;           // 1: merge with (out_acc, lse); 0: overwrite them
    int32_t reserved;
} distflash_forward_task;

// Backward: adds this task's share to the fp32 dq, dk, dv. lse and delta are those of the whole
// attention (all keys), so tasks over parts of the keys sum to the exact gradient.
typedef struct {
    distflash_block block;
    distflash_tensor q, k, v, dout;  // 16-bit, all of one dtype
    distflash_rows lse, delta;
    distflash_tensor dq, dk, dv;     // fp32 accumulators, 16-byte aligned, strides in fours
} distflash_backward_task;

// Options of an attention launch.
typedef struct {
    float softmax_scale;
    int32_t dtype;           // BF16 or FP16
    int32_t head_dim;        // 64, 96, 128, 192 or 256
    int32_t num_sms;         // multiprocessors to occupy; 0 = all
    int32_t deterministic;   // backward: 1 = run-to-run bitwise equal results
    int32_t tiles_per_shift; // a block leaves after at most so many tiles, and another follows, so
                             // that kernels of a higher priority need not wait for the last tile;
                             // blocks that follow may run beside num_sms others. 0 = blocks stay
} distflash_options;

int distflash_api_version(void);

// NULL if the current device can run these kernels (compute capability 9.0).
const char* distflash_check_device(void);

// One launch for a list of tasks. Consecutive tasks with the same out, out_acc and lse views
// share a query range: they are done in turn inside one thread block, and their state is read
// and written once (accumulate of the first one counts; out of each must be the same). Any other
// two tasks of one call must not overlap in the state they write.
const char* distflash_forward(const distflash_forward_task* tasks, int32_t num_tasks,
                              const distflash_options* options, distflash_stream stream);

// Tasks of one call may share dq, dk and dv ranges: additions are atomic, or, if deterministic,
// ordered (see options).
const char* distflash_backward(const distflash_backward_task* tasks, int32_t num_tasks,
                               const distflash_options* options, distflash_stream stream);

// Row kernels. A shape is (batch, heads, seq, head_dim), head_dim a multiple of 8, at most 256.
typedef struct {
    int32_t batch, heads, seq, head_dim;
} distflash_shape;

// (acc, acc_lse) <- merge of the state with a partial (o of `dtype`, o_lse). Safe at any LSE gap
// and with -inf on either side; where acc_lse is -inf, acc need not hold numbers.
const char* distflash_merge(const distflash_shape* shape, const distflash_tensor* acc,
                            const distflash_rows* acc_lse, const distflash_tensor* o,
                            const distflash_rows* o_lse, int32_t dtype, distflash_stream stream);

// out <- merge of the state (acc, acc_lse) with its last partial (o, o_lse); o and out share `dtype`
// (16-bit). Updates acc_lse and leaves acc as it is; rows that saw no key get zeros.
const char* distflash_finish(const distflash_shape* shape, const distflash_tensor* acc,
                             const distflash_rows* acc_lse, const distflash_tensor* o,
                             const distflash_rows* o_lse, const distflash_tensor* out,
                             int32_t dtype, distflash_stream stream);

// delta <- rowsum(o * dout); o and dout share `dtype` (16-bit or fp32).
const char* distflash_delta(const distflash_shape* shape, const distflash_tensor* o,
                            const distflash_tensor* dout, const distflash_rows* delta,
                            int32_t dtype, distflash_stream stream);

// out <- dout * delta / |dout|^2, the shortest output whose rowsum with dout is delta, for library
// backwards that want an output only to form delta; out is 0 where dout is. Safe at any size of
// dout. out and dout share `dtype` (16-bit or fp32).
const char* distflash_stand_in(const distflash_shape* shape, const distflash_tensor* dout,
                               const distflash_rows* delta, const distflash_tensor* out,
                               int32_t dtype, distflash_stream stream);

// acc (fp32) += x of `dtype`.
const char* distflash_accumulate(const distflash_shape* shape, const distflash_tensor* acc,
                                 const distflash_tensor* x, int32_t dtype,
                                 distflash_stream stream);

// out of `dtype` (16-bit) <- acc (fp32).
const char* distflash_cast(const distflash_shape* shape, const distflash_tensor* out,
                           const distflash_tensor* acc, int32_t dtype, distflash_stream stream);

#ifdef __cplusplus
}
#endif
