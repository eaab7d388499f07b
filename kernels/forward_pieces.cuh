// Forward attention with a running state, Hopper: all but the kernel itself (forward_sm90.cuh).
//
// A thread block is persistent: it takes query tiles (64 rows a consumer warpgroup) from a shared
// counter. One producer warp copies Q, K and V tiles into shared memory; the consumer warpgroups
// each own 64 query rows and keep O, the scores S and the probabilities P in registers:
//
//   S(j) = Q K(j)^T is issued, then O += P(j-1) V(j-1); the softmax of S(j) runs while the second
//   product is still in flight, and named barriers hand the tensor cores from one warpgroup to
//   the next so that one warpgroup's softmax runs beside the other's products.
//
// The epilogue merges the block into the state of its rows: each quad of lanes holds 32
// contiguous bytes of a row, so state is read and written in whole sectors from registers.
// Three consumer warpgroups begin with the old state instead: forward_narrow.cuh.
#pragma once
#include "tasks_sm90.cuh"

namespace distflash {

template <typename T_, int kHeadDim_, int kKeys_, int kWarpgroups_>
struct ForwardShape {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kKeys = kKeys_;              // keys of a tile
    static constexpr int kWarpgroups = kWarpgroups_;  // consumers
    static constexpr bool kNarrow = kWarpgroups == 3;  // see forward_narrow.cuh
    static constexpr int kRows = 64 * kWarpgroups;    // queries of a tile
    static constexpr int kThreads = 128 * (kWarpgroups + 1);
    static constexpr int kStages = 2;
    static constexpr int kSlabs = (kHeadDim + kSlab - 1) / kSlab;
    static constexpr int kQuerySlabBytes = 64 * kSlab * 2;
    static constexpr int kKeySlabBytes = kKeys * kSlab * 2;
    static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;

    struct Storage {
        alignas(1024) char q[kWarpgroups][kSlabs * kQuerySlabBytes];
        alignas(1024) char k[kStages][kSlabs * kKeySlabBytes];
        alignas(1024) char v[kStages][kSlabs * kKeySlabBytes];
        uint64_t q_full[kWarpgroups], q_empty[kWarpgroups];
        uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
        uint64_t tile_full[2], tile_empty[2];
        int tile[2];
    };
    static constexpr int kSharedBytes = sizeof(Storage);
};

// ---------------------------------------------------------------- products

template <typename S>
__device__ inline void issue_scores(float (&s)[S::kKeys / 2], uint64_t q, uint64_t k) {
    issue_k_major<typename S::T, S::kHeadDim, S::kQuerySlabBytes, S::kKeySlabBytes>(s, q, k);
}

template <typename S>
__device__ inline void issue_output(float (&o)[S::kHeadDim / 2], uint32_t (&p)[S::kKeys / 16][4],
                                    uint64_t v) {
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step) {
        const uint64_t rows = operand_at(v, step * 16 * kSlab * 2);
        if constexpr (S::kHeadDim == 96) {  // a slab and a half: one product for each
            wgmma_rs<typename S::T, 1>(reinterpret_cast<float(&)[32]>(o[0]), p[step], rows, 1);
            wgmma_rs<typename S::T, 1>(reinterpret_cast<float(&)[16]>(o[32]), p[step],
                                       operand_at(rows, S::kKeySlabBytes), 1);
        } else {
            wgmma_rs<typename S::T, 1>(o, p[step], rows, 1);
        }
    }
    wgmma_commit();
}

// ---------------------------------------------------------------- softmax

// Running maximum (of scores times scale_log2) and sum of the two rows of a thread. Sums are partial
// over the quad of lanes that shares a row until the tile ends.
struct RowState {
    float max[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.f, 0.f};
};

__device__ inline float quad_max(float x) {
    x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return max_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int kCount>
__device__ inline void apply_mask(float (&s)[kCount], const Band& band, int row, int column) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int last = min(band.k_len - 1, row + 8 * r + band.right) - column;
        const int first = row + 8 * r + band.left - column;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * i + e > last || 8 * i + e < first) s[4 * i + 2 * r + e] = -INFINITY;
    }
}

// s <- exp(scale (s - new maximum)); returns what O must be scaled by. A row that has seen no key
// yet keeps maximum -inf, sum 0 and probabilities 0. One with a score that is no number, or +inf,
// has probabilities and a sum that are none from then on.
template <int kCount>
__device__ inline void softmax_step(float (&s)[kCount], RowState& state, float (&rescale)[2],
                                    float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
        for (int i = 1; i < kCount / 4; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) top[e] = max_nan(top[e], s[4 * i + 2 * r + e]);
        const float before = state.max[r];
        float now = max_nan(before, quad_max(max_nan(top[0], top[1])) * scale_log2);
        if (now == INFINITY) now = NAN;
        state.max[r] = now;
        const float base = now == -INFINITY ? 0.f : now;
        rescale[r] = exp2_fast(before - base);
        float sum[2] = {state.sum[r] * rescale[r], 0.f};
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[4 * i + 2 * r + e];
                x = exp2_fast(x * scale_log2 - base);
                sum[e] += x;
            }
        state.sum[r] = sum[0] + sum[1];
    }
}

template <typename T, int kSteps, int kCount>
__device__ inline void pack_probabilities(uint32_t (&p)[kSteps][4], const float (&s)[kCount]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
}

template <int kCount>
__device__ inline void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// ---------------------------------------------------------------- epilogue

// Where a thread's two rows lie in the state, and whether they exist.
struct RowPlaces {
    bool valid[2];
    float* acc[2];  // null if there is no fp32 state
    float* lse[2];

    __device__ RowPlaces(const QueryTile& at, int row) {
        const QueryRange& range = *at.range;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t i = row + 8 * r;
            valid[r] = i < range.q_len;
            lse[r] = range.lse + at.batch * range.lse_stride.batch +
                     at.head * range.lse_stride.head + i * range.lse_stride.seq;
            acc[r] = range.out_acc == nullptr
                         ? nullptr
                         : range.out_acc + at.batch * range.out_acc_stride.batch +
                               at.head * range.out_acc_stride.head + i * range.out_acc_stride.seq;
        }
    }
};

// The same with the LSE that is there, -inf where a row has no state to merge with.
struct StateRows : RowPlaces {
    float old_lse[2];
    bool any_old;

    __device__ StateRows(const QueryTile& at, int row) : RowPlaces(at, row) {
        any_old = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            old_lse[r] = at.range->accumulate && valid[r] ? *lse[r] : -INFINITY;
            any_old |= old_lse[r] != -INFINITY;
        }
    }

    // Brings the lines of both rows into the L2 cache, long before they are loaded. The quad of
    // lanes shares a row.
    template <int kHeadDim>
    __device__ void prefetch(int lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int column = 0; column < kHeadDim; column += 128)
                if (valid[r] && column + lane % 4 * 32 < kHeadDim)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(acc[r] + column + lane % 4 * 32));
    }

    // Columns 8 * group + 2 * (lane % 4) of row r of the old state; zero where there is none.
    __device__ float2 load(int r, int column) const {
        if (old_lse[r] == -INFINITY) return make_float2(0.f, 0.f);
        return *reinterpret_cast<const float2*>(acc[r] + column);
    }
};

// Lane l of a quad holds word w of group j in x[j] where w = l; afterwards it holds the four
// words of group l.
__device__ inline void quad_transpose(uint32_t (&x)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[j] : x[j + 1], 1);
        if (odd) x[j] = got; else x[j + 1] = got;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? x[j] : x[j + 2], 2);
        if (high) x[j] = got; else x[j + 2] = got;
    }
}

// Writes o (of 16 bit) with 16-byte stores: the lanes of a quad swap words first.
template <typename T, int kCount>
__device__ inline void store_16bit(const float (&o)[kCount], const QueryTile& at, int row,
                                   const bool (&valid)[2]) {
    const QueryRange& range = *at.range;
    const int lane = threadIdx.x % 4;
    T* base = static_cast<T*>(range.out) + at.batch * range.out_stride.batch +
              at.head * range.out_stride.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        T* out = base + int64_t(row + 8 * r) * range.out_stride.seq + lane * 8;
#pragma unroll
        for (int i = 0; i < kCount / 16; ++i) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at_group = 4 * (4 * i + j) + 2 * r;
                x[j] = pack<T>(o[at_group], o[at_group + 1]);
            }
            quad_transpose(x, lane);
            if (valid[r])
                *reinterpret_cast<uint4*>(out + 32 * i) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Writes o where the range wants it.
template <typename T, int kCount>
__device__ inline void write_output(const float (&o)[kCount], const RowPlaces& rows,
                                    const QueryTile& at, int row) {
    if (at.range->out != nullptr) {
        store_16bit<T>(o, at, row, rows.valid);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (rows.valid[r])
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i)
                *reinterpret_cast<float2*>(rows.acc[r] + 8 * i + 2 * (threadIdx.x % 4)) =
                    make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
}

constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;

// Weights of the new block and of the old state, and the merged LSE, for a row with the given
// softmax maximum and (whole) sum. All weights are 0 where nothing was seen. What is no number
// stays none, in the LSE too, lest the next block should hide it.
struct Merge {
    float new_weight, old_weight, lse;

    __device__ Merge(float max, float sum, float old_lse) {
        const float new_lse = sum == 0.f ? -INFINITY : max * kLn2 + __logf(sum);
        const float top = fmaxf(new_lse, old_lse);
        const float base = top == -INFINITY ? 0.f : top;
        const float new_share = __expf(new_lse - base), old_share = __expf(old_lse - base);
        const float total = new_share + old_share;
        new_weight = new_share == 0.f ? 0.f : new_share / (total * sum);
        old_weight = old_share == 0.f ? 0.f : old_share / total;
        lse = total == 0.f ? -INFINITY : base + __logf(total);
    }
};

template <typename S>
__device__ inline void write_state(float (&o)[S::kHeadDim / 2], const RowState& state,
                                   StateRows& rows, const float2* prefetched,
                                   const QueryTile& at, int row) {
    const int lane = threadIdx.x % 4;
    float new_weight[2], old_weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Merge merge(state.max[r], quad_sum(state.sum[r]), rows.old_lse[r]);
        new_weight[r] = merge.new_weight;
        old_weight[r] = merge.old_weight;
        if (rows.valid[r] && lane == 0) *rows.lse[r] = merge.lse;
    }
#pragma unroll
    for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 old = make_float2(0.f, 0.f);
            if (prefetched != nullptr)
                old = prefetched[2 * i + r];
            else if (rows.any_old)
                old = rows.load(r, 8 * i + 2 * lane);
            o[4 * i + 2 * r] = o[4 * i + 2 * r] * new_weight[r] + old.x * old_weight[r];
            o[4 * i + 2 * r + 1] = o[4 * i + 2 * r + 1] * new_weight[r] + old.y * old_weight[r];
        }
    write_output<typename S::T>(o, rows, at, row);
}

// ---------------------------------------------------------------- producer

template <typename S>
__device__ inline void produce(const ForwardParams& params, typename S::Storage& smem) {
    Ring<S::kStages> ring;
    TileSource tiles;
    uint32_t q_phase = 0;
    while (true) {
        const int idx = tiles.next(params, smem);
        if (idx >= params.num_tiles) return;

        const QueryTile at = locate_query_tile(params, idx);
        const QueryRange& range = *at.range;
        const int q_begin = at.tile * S::kRows, kv_head = at.head / range.heads_per_kv;
        const auto load_queries = [&] {
            for (int w = 0; w < S::kWarpgroups; ++w) {
                barrier_wait(&smem.q_empty[w], q_phase ^ 1);
                barrier_arrive_expect(&smem.q_full[w], S::kSlabs * S::kQuerySlabBytes);
                for (int slab = 0; slab < S::kSlabs; ++slab)
                    tensor_load(smem.q[w] + slab * S::kQuerySlabBytes, &range.q, &smem.q_full[w],
                                slab * kSlab, q_begin + 64 * w, at.head, at.batch);
            }
            q_phase ^= 1;
        };
        if constexpr (!S::kNarrow) load_queries();
        KeyWalk<S::kKeys> walk(params, range, q_begin, S::kRows);
        bool first = S::kNarrow;
        for (bool more = true; more; more = walk.next(), ring.advance()) {
            const int s = ring.stage;
            const auto load = [&](char* to, const CUtensorMap& from, uint64_t* full,
                                  uint64_t* empty) {
                barrier_wait(empty, ring.phase ^ 1);
                barrier_arrive_expect(full, S::kSlabs * S::kKeySlabBytes);
                for (int slab = 0; slab < S::kSlabs; ++slab)
                    tensor_load(to + slab * S::kKeySlabBytes, &from, full, slab * kSlab,
                                walk.tile * S::kKeys, kv_head, at.batch);
            };
            load(smem.k[s], walk.segment->k, &smem.k_full[s], &smem.k_empty[s]);
            if constexpr (S::kNarrow)  // room for keys comes earlier than room for queries
                if (first) load_queries();
            first = false;
            load(smem.v[s], walk.segment->v, &smem.v_full[s], &smem.v_empty[s]);
        }
    }
}

// ---------------------------------------------------------------- consumers

// Named barriers that hand the tensor cores from warpgroup to warpgroup.
template <typename S>
struct Turn {
    int own, next;
    __device__ explicit Turn(int warpgroup)
        : own(1 + warpgroup), next(1 + (warpgroup + 1) % S::kWarpgroups) {
        if (warpgroup == S::kWarpgroups - 1) named_arrive(next, 256);  // the first one begins
    }
    __device__ void take() const { named_sync(own, 256); }
    __device__ void pass() const { named_arrive(next, 256); }
};

template <typename S>
__device__ inline void consume(const ForwardParams& params, typename S::Storage& smem,
                               int warpgroup) {
    using T = typename S::T;
    const int warp_lane = threadIdx.x % 32;
    const int row_in_tile = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + warp_lane / 4;
    const uint64_t q_operand = operand_k_major(smem.q[warpgroup]);
    const uint64_t k_operand = operand_k_major(smem.k[0]);
    const uint64_t v_operand = operand_mn_major(smem.v[0], S::kKeySlabBytes);
    constexpr int kStageBytes = S::kSlabs * S::kKeySlabBytes;
    const Turn<S> turn(warpgroup);
    Ring<S::kStages> ring;
    TileFeed tiles;
    uint32_t q_phase = 0;
    const auto release = [&](uint64_t* barrier) {
        if (warp_lane == 0) barrier_arrive(barrier);
    };

    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) return;

        const QueryTile at = locate_query_tile(params, idx);
        const int q_begin = at.tile * S::kRows, row = q_begin + row_in_tile;
        const int first_row = q_begin + warpgroup * 64;
        float s[S::kKeys / 2], o[S::kHeadDim / 2], rescale[2];
        uint32_t p[S::kKeys / 16][4];
        RowState state;
        if (at.range->accumulate) StateRows(at, row).template prefetch<S::kHeadDim>(warp_lane);
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 2; ++i) o[i] = 0.f;

        KeyWalk<S::kKeys> walk(params, *at.range, q_begin, S::kRows);
        const auto mask = [&] {
            const Band& band = walk.segment->band;
            const int column = walk.tile * S::kKeys;
            if (band.cuts(first_row, first_row + 64, column, column + S::kKeys))
                apply_mask(s, band, row, column + 2 * (warp_lane % 4));
        };
        barrier_wait(&smem.q_full[warpgroup], q_phase);
        q_phase ^= 1;
        barrier_wait(&smem.k_full[ring.stage], ring.phase);
        issue_scores<S>(s, q_operand, operand_at(k_operand, ring.stage * kStageBytes));
        wgmma_wait<0>();
        pin(s);
        release(&smem.k_empty[ring.stage]);
        mask();
        softmax_step(s, state, rescale, params.scale_log2);
        pack_probabilities<T>(p, s);

        while (walk.next()) {
            const Ring<S::kStages> last = ring;
            ring.advance();
            barrier_wait(&smem.k_full[ring.stage], ring.phase);
            turn.take();
            issue_scores<S>(s, q_operand, operand_at(k_operand, ring.stage * kStageBytes));
            barrier_wait(&smem.v_full[last.stage], last.phase);
            issue_output<S>(o, p, operand_at(v_operand, last.stage * kStageBytes));
            turn.pass();
            wgmma_wait<1>();
            pin(s);
            release(&smem.k_empty[ring.stage]);
            mask();
            softmax_step(s, state, rescale, params.scale_log2);
            keep_before(fminf(state.sum[0], state.sum[1]) < 0.f);
            wgmma_wait<0>();
            pin(o);
#pragma unroll
            for (int step = 0; step < S::kKeys / 16; ++step) pin(p[step]);
            release(&smem.v_empty[last.stage]);
            pack_probabilities<T>(p, s);
            scale_rows(o, rescale);
        }
        release(&smem.q_empty[warpgroup]);
        barrier_wait(&smem.v_full[ring.stage], ring.phase);
        issue_output<S>(o, p, operand_at(v_operand, ring.stage * kStageBytes));

        // The old state is fetched while the last product runs; wide heads lack the registers.
        constexpr bool kPrefetch = S::kHeadDim <= 128;
        StateRows rows(at, row);
        float2 old[kPrefetch ? S::kHeadDim / 4 : 1];
        if constexpr (kPrefetch)
#pragma unroll
            for (int i = 0; i < S::kHeadDim / 8; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    old[2 * i + r] = rows.load(r, 8 * i + 2 * (warp_lane % 4));
        wgmma_wait<0>();
        pin(o);
        release(&smem.v_empty[ring.stage]);
        ring.advance();
        write_state<S>(o, state, rows, kPrefetch ? old : nullptr, at, row);
    }
}

}  // namespace distflash
