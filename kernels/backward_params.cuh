// What a backward launch carries to the device, its units of work, and the shapes of its kernels.
#pragma once
#include "tasks_sm90.cuh"

namespace distflash {

constexpr int kOrderCounters = 2;  // of a tile: one for each warpgroup

// One task. Order counters (deterministic mode; zero at the launch) or null: dq_order [batch,
// heads][query tiles][kOrderCounters], dkv_order [batch, KV heads][key tiles][kOrderCounters].
struct alignas(128) BackwardTaskParams {
    CUtensorMap q, k, v, dout, dq_add;
    const float* lse;
    const float* delta;
    float* dq;
    float* dk;
    float* dv;
    int* dq_order;
    int* dkv_order;
    Strides3 lse_stride, delta_stride, dq_stride, dk_stride, dv_stride;
    Band band;
    int q_heads, heads_per_kv, batch_heads;
    int q_len, num_q_tiles, num_k_tiles;
    int descending;  // take the last key tiles first (deterministic mode)
    int section_heads;  // query heads whose Q, dO and dQ should share the L2 cache
    int num_tiles;      // batch_heads * num_k_tiles
    int early_tiles;    // key tiles of each head that are not kept for the end
};

struct BackwardParams {
    BackwardTaskParams task[kMaxSegments];
    int num_tiles;
    int whole_units, pieces;  // units from this one on are cut into pieces along the queries
    float scale, scale_log2;
    TileSchedule schedule;
};

// One unit of work: a key tile of a query head, and the query tiles that see it.
struct KeyTile {
    const BackwardTaskParams* task;
    int tile, head, batch;
    int first_query_tile, last_query_tile;  // [first, last)

    __device__ bool empty() const { return first_query_tile >= last_query_tile; }
};

// Inside a section of heads the first keys come first: with a causal mask they take longest. The
// last keys of all heads are kept for the end of the task, so that multiprocessors which run dry
// during the last long tiles have short ones to do. In deterministic mode the last keys come first:
// under a causal mask they reach a query tile earliest, so that adding in this order hardly waits,
// and a unit waits only for units with smaller numbers.
template <typename S>
__device__ inline KeyTile locate_key_tile(const BackwardParams& params, int idx) {
    constexpr int kRows = S::kRows, kKeys = S::kKeys;
    const BackwardTaskParams* task = params.task;
    int piece = 0, pieces = 1;
    if (idx >= params.whole_units) {
        pieces = params.pieces;
        piece = (idx - params.whole_units) % pieces;
        idx = params.whole_units + (idx - params.whole_units) / pieces;
    }
    while (idx >= task->num_tiles) {
        idx -= task->num_tiles;
        ++task;
    }
    const int early_units = task->batch_heads * task->early_tiles;
    const bool is_early = idx < early_units;
    if (!is_early) idx -= early_units;
    const int section_heads = is_early ? task->section_heads : task->batch_heads;
    const int section_tiles =
        section_heads * (is_early ? task->early_tiles : task->num_k_tiles - task->early_tiles);
    const int section = idx / section_tiles;
    idx -= section * section_tiles;
    const int first_head = section * section_heads;
    const int heads = min(section_heads, task->batch_heads - first_head);
    const int batch_head = first_head + idx % heads;
    const int from_first = (is_early ? 0 : task->early_tiles) + idx / heads;
    const int tile = task->descending ? task->num_k_tiles - 1 - from_first : from_first;
    const Band& band = task->band;
    const int first = band.first_query_tile(tile * kKeys, kRows);
    const int num = max(0, band.last_query_tile((tile + 1) * kKeys, task->q_len, kRows) - first);
    return {task,
            tile,
            batch_head % task->q_heads,
            batch_head / task->q_heads,
            first + num * piece / pieces,
            first + num * (piece + 1) / pieces};
}

// kHeadDim is kColumns rounded up to what the kernel handles; the copies fill in zeros.
template <typename T_, int kColumns_, int kRows_>
struct BackwardShape {
    using T = T_;
    static constexpr int kColumns = kColumns_;
    static constexpr bool kWide = kColumns > 128;
    static constexpr int kHeadDim = kColumns == 64 ? 64 : kWide ? 256 : 128;
    static constexpr int kRows = kRows_;            // queries of a tile
    static constexpr int kKeys = kWide ? 64 : 128;  // keys of a tile
    static constexpr int kWarpgroups = 2;
    static constexpr int kThreads = 384;
    static constexpr int kStages = 2;  // of Q, dO and dS
    static constexpr int kSlabs = kHeadDim / kSlab;
    static constexpr int kQuerySlabBytes = kRows * kSlab * 2;
    static constexpr int kKeySlabBytes = kKeys * kSlab * 2;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
    static constexpr int kAhead = kRows == 64 ? 4 : 2;  // see RowFeed
    static constexpr int kPiece = kHeadDim / 2;  // columns of a gradient of a wide warpgroup
    // Narrow heads compute dQ transposed, 64 columns of it by queries: of d 128 each warpgroup
    // takes half of the columns, of d 64 half of the queries.
    static constexpr bool kSplitQueries = kHeadDim == 64;
    static constexpr int kPieceRows = kSplitQueries ? kRows / 2 : kRows;
    static constexpr int kDqBytes = kWide ? 0 : kPieceRows * 64 * 4;  // fp32, 32 columns a slab
    static constexpr int kDsBytes = kKeys * kRows * 2;
    static_assert(kColumns <= 256 && kRows % kSlab == 0 && (!kWide || kRows == 64));

    struct Storage {
        alignas(1024) char k[kSlabs * kKeySlabBytes];
        alignas(1024) char v[kSlabs * kKeySlabBytes];
        alignas(1024) char q[kStages][kQueryBytes];
        alignas(1024) char dout[kStages][kQueryBytes];
        alignas(1024) char ds[kStages][kDsBytes];                // keys by queries
        alignas(1024) char staging[2][kWide ? kDsBytes : kDqBytes];  // P of wide heads, else dQ
        alignas(16) float lse_log2[kStages][kRows];  // +inf where a row takes no part
        alignas(16) float delta[kStages][kRows];
        uint64_t kv_full, kv_empty;
        uint64_t q_full[kStages], q_empty[kStages];  // Q, LSE and delta
        uint64_t dout_full[kStages], dout_empty[kStages];
        uint64_t ds_full[kStages], ds_empty[kStages];
        uint64_t dq_full[kWarpgroups], dq_empty[kWarpgroups];
        uint64_t tile_full[2], tile_empty[2];
        int tile[2];
    };
    static constexpr int kSharedBytes = sizeof(Storage);
    static_assert(kSharedBytes <= 232448);
};

// LSE and delta lie in shared memory so that four numbers in a row are what one lane needs of 16
// queries: the columns 2 l, 2 l + 1 and 2 l + 8, 2 l + 9 of lane l of a quad.
__device__ inline int row_place(int query) {
    return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
}

}  // namespace distflash
