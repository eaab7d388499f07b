// Consumers of the forward for three warpgroups (head dim 64), and the prefetch that helps them.
//
// Beside forward_pieces.cuh's consumer, which merges with the old state at the end of a tile, these
// begin with it, as if its keys had been the tile's first ones; and the scores of a tile's first
// keys are issued before the output of the tile before is written.
#pragma once
#include "forward_pieces.cuh"

namespace distflash {

// ---------------------------------------------------------------- state

// An old state counts as one score that lies this many powers of two below its LSE and weighs as
// much more. So the new scores set the maximum, and their probabilities are as exact as without a
// state (fp16 has few exponents), unless the old state outweighs them anyway.
constexpr float kHeadroom = 12.f, kHeadroomWeight = 4096.f;

// What a tile's rows begin with: the old state's maximum and sum, or those of nothing. Returns in
// `old` which rows have an output to begin with, too.
__device__ inline RowState begin_rows(const QueryTile& at, int row, bool (&old)[2]) {
    const RowPlaces rows(at, row);
    RowState state;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float lse = at.range->accumulate && rows.valid[r] ? *rows.lse[r] : -INFINITY;
        old[r] = lse != -INFINITY;
        state.max[r] = lse * kLog2e - kHeadroom;
        state.sum[r] = old[r] && threadIdx.x % 4 == 0 ? kHeadroomWeight : 0.f;
    }
    return state;
}

// O <- the old output, still without its weight, or zero.
template <int kCount>
__device__ inline void begin_output(float (&o)[kCount], const QueryTile& at, int row,
                                    const bool (&old)[2]) {
    const RowPlaces rows(at, row);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            float2 x = make_float2(0.f, 0.f);
            if (old[r])
                x = *reinterpret_cast<const float2*>(rows.acc[r] + 8 * i + 2 * (threadIdx.x % 4));
            o[4 * i + 2 * r] = x.x;
            o[4 * i + 2 * r + 1] = x.y;
        }
}

// What is left to do for the rows of a tile when all keys are through: scale O, store the LSE.
struct RowResult {
    float weight[2], lse[2];

    RowResult() = default;
    __device__ explicit RowResult(const RowState& state) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(state.sum[r]);  // not a number if a score was none
            weight[r] = sum == 0.f ? 0.f : 1.f / sum;
            lse[r] = sum == 0.f ? -INFINITY : (state.max[r] + __log2f(sum)) * kLn2;
        }
    }
};

template <typename T, int kCount>
__device__ inline void write_result(const float (&o)[kCount], const RowResult& result,
                                    const QueryTile& at, int row) {
    const RowPlaces rows(at, row);
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (rows.valid[r] && threadIdx.x % 4 == 0) *rows.lse[r] = result.lse[r];
    write_output<T>(o, rows, at, row);
}

// ---------------------------------------------------------------- prefetch

// Brings the old state of the tiles into the L2 cache, a tile ahead of the consumers. One warp.
template <typename S>
__device__ inline void prefetch_states(const ForwardParams& params, typename S::Storage& smem) {
    TileFeed tiles;
    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) return;

        const QueryTile at = locate_query_tile(params, idx);
        const QueryRange& range = *at.range;
        if (range.accumulate && elect_one()) {
            const int begin = at.tile * S::kRows, end = min(begin + S::kRows, range.q_len);
            const float* lse = range.lse + at.batch * range.lse_stride.batch +
                               at.head * range.lse_stride.head + begin * range.lse_stride.seq;
            const float* acc = range.out_acc + at.batch * range.out_acc_stride.batch +
                               at.head * range.out_acc_stride.head +
                               begin * range.out_acc_stride.seq;
#pragma unroll 1
            for (int i = begin; i < end; ++i) {
                if (i % 8 == 0) prefetch_l2(lse);  // rows mostly lie side by side
                prefetch_l2(acc, S::kHeadDim * 4);
                lse += range.lse_stride.seq;
                acc += range.out_acc_stride.seq;
            }
        }
        __syncwarp();
    }
}

// ---------------------------------------------------------------- consumers

template <typename S>
__device__ inline void consume_narrow(const ForwardParams& params, typename S::Storage& smem,
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

    int idx = tiles.next(smem);
    if (idx >= params.num_tiles) return;
    float s[S::kKeys / 2], o[S::kHeadDim / 2], rescale[2];
    uint32_t p[S::kKeys / 16][4];
    QueryTile at = locate_query_tile(params, idx);
    KeyWalk<S::kKeys> walk(params, *at.range, at.tile * S::kRows, S::kRows);
    bool old[2];
    RowState state = begin_rows(at, at.tile * S::kRows + row_in_tile, old);

    // The key tile whose scores come next, looked at before there is anything to wait for.
    const Band* band;
    int column;
    bool cut, last;  // whether a mask cuts through it; whether it is the query tile's last one
    const auto look_at_keys = [&] {
        const int row = at.tile * S::kRows + warpgroup * 64;
        band = &walk.segment->band;
        column = walk.tile * S::kKeys;
        cut = band->cuts(row, row + 64, column, column + S::kKeys);
        last = !walk.next();
    };
    // Scores, which are there, to probabilities.
    const auto softmax = [&] {
        pin(s);
        release(&smem.k_empty[ring.stage]);
        if (last) release(&smem.q_empty[warpgroup]);
        if (cut)
            apply_mask(s, *band, at.tile * S::kRows + row_in_tile, column + 2 * (warp_lane % 4));
        softmax_step(s, state, rescale, params.scale_log2);
    };
    const auto issue_output_of = [&](const Ring<S::kStages>& keys) {
        barrier_wait(&smem.v_full[keys.stage], keys.phase);
        issue_output<S>(o, p, operand_at(v_operand, keys.stage * kStageBytes));
    };

    RowResult result;
    QueryTile done;
    bool pending = false;  // O holds the result of tile `done`
    while (true) {
        look_at_keys();
        barrier_wait(&smem.q_full[warpgroup], q_phase);
        q_phase ^= 1;
        barrier_wait(&smem.k_full[ring.stage], ring.phase);
        issue_scores<S>(s, q_operand, operand_at(k_operand, ring.stage * kStageBytes));
        if (pending) write_result<T>(o, result, done, done.tile * S::kRows + row_in_tile);
        begin_output(o, at, at.tile * S::kRows + row_in_tile, old);
        wgmma_wait<0>();
        softmax();
        pack_probabilities<T>(p, s);
#pragma unroll
        for (int r = 0; r < 2; ++r) rescale[r] *= kHeadroomWeight;
        scale_rows(o, rescale);
        while (!last) {
            const Ring<S::kStages> before = ring;
            ring.advance();
            look_at_keys();
            barrier_wait(&smem.k_full[ring.stage], ring.phase);
            turn.take();
            issue_scores<S>(s, q_operand, operand_at(k_operand, ring.stage * kStageBytes));
            issue_output_of(before);
            turn.pass();
            wgmma_wait<1>();
            softmax();
            keep_before(fminf(state.sum[0], state.sum[1]) < 0.f);
            wgmma_wait<0>();
            pin(o);
            pin(p);
            release(&smem.v_empty[before.stage]);
            pack_probabilities<T>(p, s);
            scale_rows(o, rescale);
        }
        issue_output_of(ring);
        result = RowResult(state);
        done = at;
        pending = true;
        idx = tiles.next(smem);
        if (idx < params.num_tiles) {
            at = locate_query_tile(params, idx);
            walk = KeyWalk<S::kKeys>(params, *at.range, at.tile * S::kRows, S::kRows);
            state = begin_rows(at, at.tile * S::kRows + row_in_tile, old);
        }
        wgmma_wait<0>();
        pin(o);
        release(&smem.v_empty[ring.stage]);
        scale_rows(o, result.weight);  // before the next scores are issued: results of a product
        ring.advance();                // must not be read while another runs
        if (idx >= params.num_tiles) break;
    }
    write_result<T>(o, result, done, done.tile * S::kRows + row_in_tile);
}

}  // namespace distflash
