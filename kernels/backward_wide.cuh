// The backward's consumers above head dimension 128, where the accumulators of the narrow ones do
// not fit: a tile has 64 keys, and the two warpgroups share it, each computing half of the queries'
// scores and half of the columns of every gradient. Nothing is overlapped inside a warpgroup.
#pragma once
#include "backward_pieces.cuh"

namespace distflash {

template <typename S>
__device__ inline void consume_backward_wide(const BackwardParams& params,
                                             typename S::Storage& smem, int warpgroup) {
    using T = typename S::T;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int column = warpgroup * S::kPiece;  // of every gradient
    const int query_half = warpgroup * 32;     // of the scores

    const uint64_t k_rows = operand_k_major(smem.k), v_rows = operand_k_major(smem.v);
    const uint64_t q_rows = operand_k_major(smem.q[0] + query_half * 128);
    const uint64_t dout_rows = operand_k_major(smem.dout[0] + query_half * 128);
    const uint64_t k_columns =
        operand_mn_major(smem.k + column / kSlab * S::kKeySlabBytes, S::kKeySlabBytes);
    const uint64_t q_columns =
        operand_mn_major(smem.q[0] + column / kSlab * S::kQuerySlabBytes, S::kQuerySlabBytes);
    const uint64_t dout_columns =
        operand_mn_major(smem.dout[0] + column / kSlab * S::kQuerySlabBytes, S::kQuerySlabBytes);
    const uint64_t p_rows = operand_k_major(smem.staging[0]), ds_rows = operand_k_major(smem.ds[0]);
    const uint64_t ds_columns = operand_mn_major(smem.ds[0], S::kDsBytes);

    Ring<S::kStages> ring;
    TileFeed tiles;
    uint32_t kv_phase = 0, buffer = 0;
    const auto release = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S>(params, idx);
        if (at.empty()) continue;
        const GradientSink sink(at, warpgroup);
        const Band& band = at.task->band;
        const int first_key = at.tile * S::kKeys, key = first_key + warp * 16 + lane / 4;

        float dk[S::kPiece / 2], dv[S::kPiece / 2];
#pragma unroll
        for (int i = 0; i < S::kPiece / 2; ++i) dk[i] = dv[i] = 0.f;
        barrier_wait(&smem.kv_full, kv_phase);
        kv_phase ^= 1;

        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            const int stage = ring.stage, query = m * S::kRows + query_half;
            float s[16], dp[16], piece[S::kPiece / 2];
            uint32_t packed[2][4];
            barrier_wait(&smem.q_full[stage], ring.phase);
            issue_transposed<S>(s, k_rows, operand_at(q_rows, stage * S::kQueryBytes));
            barrier_wait(&smem.dout_full[stage], ring.phase);
            issue_transposed<S>(dp, v_rows, operand_at(dout_rows, stage * S::kQueryBytes));
            wgmma_wait<0>();
            pin(s);
            pin(dp);
            if (band.cuts(query, query + 32, first_key, first_key + S::kKeys))
                apply_mask_transposed(s, band, key, query + 2 * (lane % 4));
            const uint32_t first = (query_half + lane % 4 * 4) * 4;
            RowFeed<2, 2> rows(shared_address(smem.lse_log2[stage]) + first,
                               shared_address(smem.delta[stage]) + first);
            rows.exponentiate(s, params.scale_log2);
            pack_steps<T>(packed, s);
            store_transposed(smem.staging[buffer], packed, warp * 16 + lane % 16, query_half / 8);
            rows.score_gradient(dp, s);
            pack_steps<T>(packed, dp);
            store_transposed(smem.ds[buffer], packed, warp * 16 + lane % 16, query_half / 8);
            fence_async_shared();
            named_sync(1, 256);  // both halves are there; the other buffers are free again
            issue_key_gradient<S>(dv, operand_at(p_rows, buffer * S::kDsBytes),
                                  operand_at(dout_columns, stage * S::kQueryBytes));
            issue_key_gradient<S>(dk, operand_at(ds_rows, buffer * S::kDsBytes),
                                  operand_at(q_columns, stage * S::kQueryBytes));
            issue_query_gradient<S>(piece, operand_at(ds_columns, buffer * S::kDsBytes),
                                    k_columns);
            buffer ^= 1;
            wgmma_wait<0>();
            pin(dv);
            pin(dk);
            pin(piece);
            release(&smem.dout_empty[stage]);
            release(&smem.q_empty[stage]);
            sink.add_dq<S>(piece, m, warp * 16 + lane / 4, params.scale);
        }
        release(&smem.kv_empty);
        sink.add_dkv<S>(dk, dv, key, column, params.scale);
    }
}

}  // namespace distflash
