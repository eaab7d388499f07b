// What a launch carries to the device, and how a thread block walks through it: the list of
// query ranges with their key segments, the masks' tile bounds, the tile scheduler.
#pragma once
#include "ptx_sm90.cuh"

namespace distflash {

constexpr int kMaxSegments = 16;  // tasks of one launch; longer lists take several launches
constexpr int kFar = 1 << 30;     // beyond every mask bound; lengths stay below it

struct Strides3 {
    int64_t batch, head, seq;  // elements
};

// A query i of the task sees the keys j with i + left <= j <= i + right and j < k_len.
struct Band {
    int k_len, left, right;

    // Key tiles [first, last) of kTile keys that some query of [q_begin, q_end) may see.
    __device__ int first_tile(int q_begin, int tile) const { return max(0, q_begin + left) / tile; }
    __device__ int last_tile(int q_end, int tile) const {
        const int last_key = min(k_len - 1, q_end - 1 + right);
        return last_key < 0 ? 0 : last_key / tile + 1;
    }

    // Query tiles [first, last) of `tile` queries that see some key of [k_begin, k_end).
    __device__ int first_query_tile(int k_begin, int tile) const {
        return max(0, k_begin - right) / tile;
    }
    __device__ int last_query_tile(int k_end, int q_len, int tile) const {
        const int last_query = min(q_len - 1, min(k_end, k_len) - 1 - left);
        return last_query < 0 ? 0 : last_query / tile + 1;
    }

    // Whether some (query, key) pair of the two ranges is masked.
    __device__ bool cuts(int q_begin, int q_end, int k_begin, int k_end) const {
        return k_end > k_len || k_end - 1 > q_begin + right || k_begin < q_end - 1 + left;
    }
};

// Keys and values of one forward task.
struct alignas(128) KeySegment {
    CUtensorMap k, v;
    Band band;
};

// A query range and the segments that are merged into its state.
struct alignas(128) QueryRange {
    CUtensorMap q;
    float* out_acc;
    void* out;  // 16-bit destination, or null
    float* lse;
    Strides3 out_acc_stride, out_stride, lse_stride;
    int q_heads, heads_per_kv, batch_heads;
    int q_len, num_q_tiles;
    int section_heads;  // query heads whose K and V should share the L2 cache
    int num_tiles;      // batch_heads * num_q_tiles
    int first_segment, num_segments;
    int accumulate;
};

// Where the blocks of a launch take their tiles. Zero before and after it.
struct TileCounter {
    int next;       // tile
    unsigned left;  // blocks that take no further tile
};

// How tiles go to blocks. A block leaves after a shift of so many tiles: a multiprocessor goes to
// whoever waits for one with the highest priority only when a block ends, and kernels that move
// data should not wait for the end of attention. The first blocks' shifts are 1, 2 ... shift,
// 1 ... tiles, so that not all end at once.
struct TileSchedule {
    TileCounter* counter;
    int shift;
    int first_blocks;

    __device__ int tiles_of(int block) const {
        return block < first_blocks ? 1 + block % shift : shift;
    }
};

struct ForwardParams {
    QueryRange range[kMaxSegments];
    KeySegment segment[kMaxSegments];
    int num_tiles;
    float scale, scale_log2;  // softmax scale; the same times log2(e)
    TileSchedule schedule;
};

// One unit of work of the forward.
struct QueryTile {
    const QueryRange* range;
    int tile, head, batch;
};

// Heads are taken in sections whose keys and values fit the L2 cache; inside a section the last
// query tiles come first, since with a causal mask they take longest.
__device__ inline QueryTile locate_query_tile(const ForwardParams& params, int idx) {
    const QueryRange* range = params.range;
    while (idx >= range->num_tiles) {
        idx -= range->num_tiles;
        ++range;
    }
    const int section_tiles = range->section_heads * range->num_q_tiles;
    const int section = idx / section_tiles;
    idx -= section * section_tiles;
    const int first_head = section * range->section_heads;
    const int heads = min(range->section_heads, range->batch_heads - first_head);
    const int batch_head = first_head + idx % heads;
    return {range, range->num_q_tiles - 1 - idx / heads, batch_head % range->q_heads,
            batch_head / range->q_heads};
}

// Walks over the key tiles of a query tile: segments in order, in each the last keys first (so
// that the tiles a causal mask cuts come first). A query tile that sees no key at all gets one
// tile, which is then masked entirely: the pipeline never runs empty.
template <int kTile>
struct KeyWalk {
    const KeySegment* segment;
    const KeySegment* end;
    int q_begin, q_end;
    int tile, first;

    __device__ KeyWalk(const ForwardParams& params, const QueryRange& range, int begin, int rows) {
        segment = params.segment + range.first_segment;
        end = segment + range.num_segments;
        q_begin = begin;
        q_end = min(begin + rows, range.q_len);
        if (!enter_segment()) {
            segment = end - 1;
            tile = first = 0;
        }
    }

    // Moves on; false if there is no further tile.
    __device__ bool next() {
        if (--tile >= first) return true;
        ++segment;
        return enter_segment();
    }

    __device__ bool enter_segment() {
        for (; segment != end; ++segment) {
            tile = segment->band.last_tile(q_end, kTile) - 1;
            first = segment->band.first_tile(q_begin, kTile);
            if (tile >= first) return true;
        }
        return false;
    }
};

// Position in a ring of shared-memory stages and the parity of its barriers' current phase.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Hand-over of tiles from the producer to everybody else in the block, two deep; both ends of it
// work on a Storage with tile, tile_full and tile_empty.
struct TileSource {
    Ring<2> ring;
    int taken = 0;

    // The next tile, announced (num_tiles or more ends everybody's work). One thread.
    template <typename Params, typename Storage>
    __device__ int next(const Params& params, Storage& smem) {
        const int idx = take(params.schedule, params.num_tiles);
        barrier_wait(&smem.tile_empty[ring.stage], ring.phase ^ 1);
        smem.tile[ring.stage] = idx;
        barrier_arrive(&smem.tile_full[ring.stage]);
        ring.advance();
        return idx;
    }

    // Blocks take every tile from the counter, the first one too, since some start late; and they
    // take it when all loads of the current tile are issued, not before: a block that took its next
    // tile early would sit on it while others run dry or (deterministic mode) wait for it. Nor does
    // a block leave with a tile taken. The last one to leave makes the counter zero again.
    __device__ int take(const TileSchedule& schedule, int num_tiles) {
        int idx = num_tiles;
        if (taken++ < schedule.tiles_of(blockIdx.x)) idx = atomicAdd(&schedule.counter->next, 1);
        if (idx >= num_tiles && atomicInc(&schedule.counter->left, gridDim.x - 1) == gridDim.x - 1)
            schedule.counter->next = 0;
        return idx;
    }
};

struct TileFeed {
    Ring<2> ring;

    // The tile announced next. One warp.
    template <typename Storage>
    __device__ int next(Storage& smem) {
        barrier_wait(&smem.tile_full[ring.stage], ring.phase);
        const int idx = uniform(smem.tile[ring.stage]);
        if (threadIdx.x % 32 == 0) barrier_arrive(&smem.tile_empty[ring.stage]);
        ring.advance();
        return idx;
    }
};

// Once a block: `warps` is how many take each tile.
template <typename Storage>
__device__ inline void init_tiles(Storage& smem, int warps) {
    for (int s = 0; s < 2; ++s) {
        barrier_init(&smem.tile_full[s], 1);
        barrier_init(&smem.tile_empty[s], warps);
    }
}

// A kernel's dynamic shared memory as its Storage. It starts at a multiple of 1024, which swizzled
// operands need; as a constant the base saves registers.
template <typename Storage>
__device__ inline Storage& storage_at(char* raw) {
    if (shared_address(raw) % 1024 != 0) asm volatile("trap;");
    return *reinterpret_cast<Storage*>(raw);
}

}  // namespace distflash
