// The backward's consumers up to head dimension 128.
//
// A tile has 128 keys, 64 for each of two warpgroups. Everything is computed transposed, keys as
// rows, so that P and dS feed the dV and dK products from registers; only dS goes through shared
// memory, for dQ. A warpgroup's order in the query tile i:
//
//   S and dP are issued; P = exp(S) runs beside dP; then dS = P (dP - delta);
//   dV, dQ(i-1) and dK are issued, and dQ(i-1) is staged beside dK.
//
// What one warpgroup does not overlap, the other one does: nothing keeps the two together, since dQ
// comes one tile late and so waits for no dS of the same tile. Issuing S(i+1) beside dK, or dV
// beside dS, is slower: the registers that it holds cost more than it hides, and dS would have to
// feed dK from shared memory, whose bandwidth is the limit.
#pragma once
#include "backward_pieces.cuh"

namespace distflash {

// Operands of a warpgroup's products, in the first stages of their rings.
template <typename S>
struct BackwardOperands {
    uint64_t k_rows, v_rows;        // this warpgroup's keys
    uint64_t q_rows, dout_rows;     // queries, for the scores
    uint64_t q_columns, dout_columns;  // the same, for dK and dV
    uint64_t k_columns, ds_columns;    // this warpgroup's part of dQ

    __device__ BackwardOperands(typename S::Storage& smem, int warpgroup)
        : k_rows(operand_k_major(smem.k + warpgroup * 64 * 128)),
          v_rows(operand_k_major(smem.v + warpgroup * 64 * 128)),
          q_rows(operand_k_major(smem.q[0])),
          dout_rows(operand_k_major(smem.dout[0])),
          q_columns(operand_mn_major(smem.q[0], S::kQuerySlabBytes)),
          dout_columns(operand_mn_major(smem.dout[0], S::kQuerySlabBytes)),
          k_columns(operand_mn_major(
              smem.k + (S::kSplitQueries ? 0 : warpgroup * S::kKeySlabBytes), S::kKeySlabBytes)),
          ds_columns(operand_mn_major(
              smem.ds[0] + (S::kSplitQueries ? warpgroup * S::kKeySlabBytes : 0),
              S::kKeySlabBytes)) {}
};

template <typename S>
__device__ inline void consume_backward(const BackwardParams& params, typename S::Storage& smem,
                                        int warpgroup) {
    using T = typename S::T;
    constexpr int kSteps = S::kRows / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int key_in_tile = warpgroup * 64 + warp * 16;
    const BackwardOperands<S> operands(smem, warpgroup);
    uint64_t* const dq_full = &smem.dq_full[warpgroup];
    uint64_t* const dq_empty = &smem.dq_empty[warpgroup];

    // Where this thread writes dS, stages dQ and reads LSEs (deltas lie behind them), in the first
    // buffers.
    const uint32_t ds_at = opaque(score_gradient_address(smem.ds[0], key_in_tile + lane % 16));
    const uint32_t dq_at = opaque(staging_address<S::kPieceRows>(smem.staging[warpgroup]));
    const uint32_t lse_at = opaque(shared_address(smem.lse_log2[0]) + lane % 4 * 16);

    TileFeed tiles;
    uint32_t kv_phase = 0;
    int n = 0;  // query tiles so far: stages and phases of all rings go by it
    const auto release = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    const auto hand_over = [&](uint64_t* barrier) {  // what all lanes wrote to shared memory
        fence_async_shared();
        __syncwarp();
        release(barrier);
    };

    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) return;
        float dk[S::kHeadDim / 2], dv[S::kHeadDim / 2];
        {
            const KeyTile at = locate_key_tile<S>(params, idx);
            if (at.empty()) continue;
            const Band& band = at.task->band;
            const int first_key = at.tile * S::kKeys + warpgroup * 64;
            // Query tiles that begin in [free_from, free_to] see all keys of this warpgroup.
            const int free_from =
                opaque(band.k_len < first_key + 64 ? kFar : first_key + 63 - band.right);
            const int free_to = opaque(first_key - band.left - S::kRows + 1);
            int query = at.first_query_tile * S::kRows;
            const int begin = n, end = n + at.last_query_tile - at.first_query_tile;
#pragma unroll
            for (int i = 0; i < S::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
            pin(dk);
            pin(dv);
            barrier_wait(&smem.kv_full, kv_phase);
            kv_phase ^= 1;
            bool q_there = false;

            do {
                const int stage = uniform(n & 1), other = stage ^ 1;
                const uint32_t phase = n >> 1 & 1, phase_before = (n - 1) >> 1 & 1;
                float s[S::kRows / 2], dp[S::kRows / 2], piece[S::kPieceRows / 2];
                uint32_t p16[kSteps][4], ds16[kSteps][4];

                finish_wait(q_there, &smem.q_full[stage], phase);
                const uint32_t lse = opaque(lse_at) + stage * S::kRows * 4;
                RowFeed<kSteps, S::kAhead> rows(lse, lse + S::kStages * S::kRows * 4);
                const bool dout_there = barrier_test(&smem.dout_full[stage], phase);
                issue_transposed<S>(s, operands.k_rows,
                                    operand_at(operands.q_rows, stage * S::kQueryBytes));
                finish_wait(dout_there, &smem.dout_full[stage], phase);
                issue_transposed<S>(dp, operands.v_rows,
                                    operand_at(operands.dout_rows, stage * S::kQueryBytes));
                wgmma_wait<1>();  // S
                pin(s);
                if (query < free_from || query > free_to)
                    apply_mask_transposed(s, band, first_key + warp * 16 + lane / 4,
                                          query + 2 * (lane % 4));
                rows.exponentiate(s, params.scale_log2);
                const bool ds_free = barrier_test(&smem.ds_empty[stage], phase ^ 1);
                keep_before(any_negative(s));  // probabilities are not
                wgmma_wait<0>();               // dP
                pin(dp);
                rows.score_gradient(dp, s);
                // P is packed only now: in both forms next to dP it would take too many registers.
                pack_steps<T>(p16, s);
                pack_steps<T>(ds16, dp);
                finish_wait(ds_free, &smem.ds_empty[stage], phase ^ 1);
                store_score_gradient<S>(opaque(ds_at) + stage * S::kDsBytes, ds16);
                const bool ds_there =
                    n == begin || barrier_test(&smem.ds_full[other], phase_before);
                issue_key_gradient<S>(dv, p16,
                                      operand_at(operands.dout_columns, stage * S::kQueryBytes));
                hand_over(&smem.ds_full[stage]);
                // dQ of the tile before; at first of stale numbers, unused: a product under a
                // condition would make the compiler serialise them all.
                finish_wait(ds_there, &smem.ds_full[other], phase_before);
                issue_query_gradient_transposed<S>(
                    piece, operands.k_columns,
                    operand_at(operands.ds_columns, other * S::kDsBytes));
                issue_key_gradient<S>(dk, ds16,
                                      operand_at(operands.q_columns, stage * S::kQueryBytes));
                const bool dq_free = n == begin || barrier_test(dq_empty, n & 1);
                wgmma_wait<2>();  // dV
                pin(dv);
                pin(p16);
                release(&smem.dout_empty[stage]);
                wgmma_wait<1>();  // dQ
                pin(piece);
                if (n > begin) {
                    release(&smem.ds_empty[other]);
                    finish_wait(dq_free, dq_empty, n & 1);
                    stage_transposed(opaque(dq_at), piece, params.scale);
                    hand_over(dq_full);
                }
                ++n;
                q_there = n < end && barrier_test(&smem.q_full[other], n >> 1 & 1);
                wgmma_wait<0>();  // dK
                pin(dk);
                pin(ds16);
                release(&smem.q_empty[stage]);
                query += S::kRows;
            } while (n < end);

            const int last = uniform(n - 1) & 1;
            float piece[S::kPieceRows / 2];
            barrier_wait(&smem.ds_full[last], (n - 1) >> 1 & 1);
            issue_query_gradient_transposed<S>(piece, operands.k_columns,
                                               operand_at(operands.ds_columns, last * S::kDsBytes));
            barrier_wait(dq_empty, n & 1);
            wgmma_wait<0>();
            pin(piece);
            release(&smem.ds_empty[last]);
            release(&smem.kv_empty);
            stage_transposed(opaque(dq_at), piece, params.scale);
            hand_over(dq_full);
        }
        // Found again, since its addresses would take registers in the loop.
        const KeyTile at = locate_key_tile<S>(params, opaque(idx));
        const GradientSink sink(at, warpgroup);
        sink.add_dkv<S>(dk, dv, at.tile * S::kKeys + key_in_tile + lane / 4, 0, params.scale);
    }
}

}  // namespace distflash
