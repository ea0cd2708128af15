"""FlashAttention-3 forward on Hopper.    O = softmax(scale·Q·Kᵀ)·V      L = log Σ exp(scale·Q·Kᵀ)

equations   per block j of keys, right to left:   S = Q·K_jᵀ;  m' = max(m, rowmax S);  α = 2^(c(m − m'));  P = 2^(cS − cm');
            l = αl + rowsum P;  O = αO + P·V_j;   c = |scale|·log2 e.       At the end O/l and L = ln2·(cm + log2 l).

roles       warps      registers      job
producer    0          24 … 56        TMA loads of Q, K, V; hands out work tiles (ragged: warps 1 to 3 clear rows of no sequence)
consumer i  4(i+1) …   240/160/112    64 query rows: both matmuls, softmax, O and L      (roles.py; tiles.q / 64 consumers)

pipes       cargo      stages         filled by   emptied by                                   arrivals to empty
q           64 rows    consumers      TMA         its consumer: copied to registers, after    one per warp of that consumer
                                                  its first Q·Kᵀ; else after its last
k           K block    tiles.stages   TMA         each consumer, after S = Q·Kᵀ; where the    one per consumer warp
                                                  block goes on trust, once that is settled
v           V block    tiles.stages   TMA         each consumer, after O += P·V                one per consumer warp
work        work tile  2              producer    each consumer                                one per consumer thread
O leaves through a buffer of its own; its way out lies under the next tile.

barriers    0 the block, once · 1+i it is consumer i's turn (ping-pong) · 8+i consumer i's threads, around its rows of O
            12+i consumer i's threads, whether a block goes on trust (softmax.py)

timeline    producer   Q K₀ V₀ K₁ V₁ …                       as far ahead as the rings allow, into the next tile
            consumer   QK₀ │ softmax₀ │ QK₁ PV₀ │ softmax₁ under PV₀ │ … │ PV_last │ O/l → shared memory → TMA
            (PTX has this order; ptxas puts the wait for P·V where it likes, unless tiles.hold says after how many exponentials.)

limits      16-bit inputs; rows of 16 bytes; head dims to 256; fewer than 2³¹ work tiles
"""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ...sequences import SequenceKind
from . import budget, roles, storage
from .barriers import NoTurn, Turn, any_above
from .clear import SPARE_WARPS, clear_gaps
from .extents import Extent, last_block, loadable, rows_view, sequence_arrays
from .fragments import LANES_PER_ROW, ROWS_PER_THREAD, accumulator, convert, rescale, scale_rows
from .keyblocks import KeyBlocks, TileBlocks, Walk, consumers_part
from .masking import FragmentMask, bounds_of
from .matmul import issue, wait_matmuls
from .operands import Arrays, MaskNumbers, Numbers, Operands, Sizes
from .pipes import StagedLoad, StagedRead, own_stage, tma_pipe, work_pipe
from .queries import make_queries
from .schedule import Dispatcher, Follower, Position, WorkTile, is_ragged
from .softmax import LOG2_E, TOLERANCE_LOG2, TRUSTED_SUM, OnlineSoftmax, ScoreMap
from .store import OutputStore
from .tiles import ROWS_PER_CONSUMER, FirstBlock, ForwardSpec, Overlap, QuerySource, Tiles, Turns


@dataclass
class Consumer:
    """64 query rows of one warpgroup: Algorithm 2, the softmax of block j beside P·V of block j − 1."""

    queries: object  # SharedQueries or RegisterQueries
    keys: StagedRead
    values: StagedRead
    scores: ScoreMap
    softmax: OnlineSoftmax
    turn: object  # Turn or NoTurn
    mask: FragmentMask
    O: cute.Tensor
    P: cute.Tensor
    qk: cute.TiledMma
    pv: cute.TiledMma
    left_keys: object  # operand and matmul of a block's left half, None unless FirstBlock.HALF
    left_qk: object
    tiles: cutlass.Constexpr[Tiles]

    @cute.jit
    def issue_scores(self):
        """A group for each part of the keys."""
        S = cute.make_rmem_tensor(self.tiles.kv // 2, Float32)
        k = self.keys.wait()
        for part in cutlass.range_constexpr(self.tiles.parts):
            self.issue_part(S, part, k)
        return S, k

    @cute.jit
    def issue_part(self, S: cute.Tensor, part: cutlass.Constexpr[int], k):
        keys = self.keys.operand[part][None, None, None, k.index]
        issue(self.qk, self.part_of(S, part), self.queries.fragment, keys, accumulate=False)

    def part_of(self, S: cute.Tensor, part: int):
        keys = self.tiles.kv // self.tiles.parts
        return accumulator(S, part * keys, keys)

    @cute.jit
    def weigh_masked(self, S: cute.Tensor, k, block: Int32, beside: cutlass.Constexpr[int]):
        """S becomes P by its maximum; returns what O is to be multiplied by. `beside`: groups of matmuls that go on meanwhile."""
        wait_matmuls(beside)
        k.release()
        scores = accumulator(S, 0, self.tiles.kv)
        self.scores.apply(scores)
        self.mask.apply(scores, block * self.tiles.kv)
        return self.softmax.update(scores, TOLERANCE_LOG2, self.tiles.hold)

    @cute.jit
    def weigh(self, S: cute.Tensor, beside: cutlass.Constexpr[int]):
        """S becomes P with the maximum that there is; returns the rows' sums."""
        sums = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        sums.fill(0.0)
        for part in cutlass.range_constexpr(self.tiles.parts):
            wait_matmuls(self.tiles.parts - 1 - part + beside)
            scores = self.part_of(S, part)
            self.scores.apply(scores)
            self.softmax.trust(scores, sums, self.tiles.hold if part == self.tiles.parts - 1 else 0)
        return sums

    @cute.jit
    def settle(self, S: cute.Tensor, k, sums: cute.Tensor):
        """Where some row's sum tells that scores have outgrown its maximum, the block is taken again. Nothing is in flight."""
        if any_above(self.turn.me, sums[0] + sums[1], TRUSTED_SUM):
            for part in cutlass.range_constexpr(self.tiles.parts):
                self.issue_part(S, part, k)
            wait_matmuls(0)
            scores = accumulator(S, 0, self.tiles.kv)
            self.scores.apply(scores)
            scale_rows(self.O, self.softmax.update(scores, 0.0, 0))
        else:
            self.softmax.accept(sums)
        k.release()

    @cute.jit
    def issue_output(self):
        v = self.values.wait()
        issue(self.pv, self.O, self.P, self.values.operand[None, None, None, v.index], accumulate=True)
        return v

    @cute.jit
    def first_block(self, block: Int32):
        S, k = self.issue_scores()
        self.O.fill(0.0)
        wait_matmuls(0)
        k.release()
        self.queries.first_scores_done()
        self.weigh_first(S, block)

    @cute.jit
    def first_half_block(self, block: Int32):
        """Only the left half of the first block is seen: half of Q·Kᵀ and of the softmax, and zeros in the rest of P."""
        S = cute.make_rmem_tensor(self.tiles.kv // 4, Float32)
        k = self.keys.wait()
        left = self.left_keys[None, None, None, k.index]
        issue(self.left_qk, accumulator(S, 0, self.tiles.kv // 2), self.queries.fragment, left, accumulate=False)
        self.O.fill(0.0)
        self.P.fill(0.0)
        wait_matmuls(0)
        k.release()
        self.queries.first_scores_done()
        self.weigh_first(S, block)

    @cute.jit
    def weigh_first(self, S: cute.Tensor, block: Int32):
        scores = accumulator(S, 0, 2 * cute.size(S))
        self.scores.apply(scores)
        self.mask.apply(scores, block * self.tiles.kv)
        self.softmax.start(scores)
        convert(S, self.P)

    @cute.jit
    def next_block(self, block: Int32, masked: cutlass.Constexpr[bool]):
        self.turn.take()
        S, k = self.issue_scores()  # S = Q·K_jᵀ, in the background
        v = self.issue_output()  # O += P_{j−1}·V_{j−1}, queued behind it
        self.turn.pass_on()
        if const_expr(masked):
            alpha = self.weigh_masked(S, k, block, beside=1)  # under P·V
            self.output_done(v)
            rescale(self.O, alpha)
        else:
            sums = self.weigh(S, beside=1)
            self.output_done(v)
            self.settle(S, k, sums)
        convert(S, self.P)

    @cute.jit
    def output_done(self, v):
        wait_matmuls(0)
        v.release()

    @cute.jit
    def pass_over(self):
        """A block that only other rows of the tile see."""
        self.keys.wait().release()
        self.values.wait().release()

    @cute.jit
    def last_output(self):
        self.output_done(self.issue_output())


@dataclass
class InOrderConsumer(Consumer):
    """Algorithm 1: softmax and matmuls of one warpgroup one after the other; only the turns overlap."""

    @cute.jit
    def first_block(self, block: Int32):
        Consumer.first_block(self, block)
        self.add_output()

    @cute.jit
    def first_half_block(self, block: Int32):
        Consumer.first_half_block(self, block)
        self.add_output()

    @cute.jit
    def add_output(self):
        self.turn.take()
        self.output_done(self.issue_output())

    @cute.jit
    def next_block(self, block: Int32, masked: cutlass.Constexpr[bool]):
        S, k = self.issue_scores()
        self.turn.pass_on()
        if const_expr(masked):
            rescale(self.O, self.weigh_masked(S, k, block, beside=0))
        else:
            sums = self.weigh(S, beside=0)
            self.settle(S, k, sums)
        convert(S, self.P)
        self.add_output()

    @cute.jit
    def last_output(self):
        self.turn.pass_on()


@cute.jit
def attend(c: Consumer, blocks: KeyBlocks, parts: cutlass.Constexpr[bool]):
    """One work tile: every block of keys that this consumer's rows see, right to left."""
    if const_expr(parts):
        for _ in cutlass.range(blocks.passed_right, unroll=1):
            c.pass_over()
    if const_expr(parts and c.tiles.first_block is FirstBlock.HALF):
        if blocks.first_half:
            c.first_half_block(blocks.first)
        else:
            c.first_block(blocks.first)
    else:
        c.first_block(blocks.first)
    block = blocks.first - 1
    for i in cutlass.range(blocks.right_edge, unroll=1):
        c.next_block(block - i, masked=True)
    block = block - blocks.right_edge
    for i in cutlass.range(blocks.interior, unroll=1):
        c.next_block(block - i, masked=False)
    block = block - blocks.interior
    for i in cutlass.range(blocks.left_edge, unroll=1):
        c.next_block(block - i, masked=True)
    c.queries.last_scores_done()
    c.last_output()
    if const_expr(parts):
        for _ in cutlass.range(blocks.passed_left, unroll=1):
            c.pass_over()
    return c


@dataclass
class Loads:
    q: StagedLoad
    k: StagedLoad
    v: StagedLoad


@cute.jit
def produce(load: Loads, blocks: TileBlocks, tile: WorkTile, kv_head: Int32, q: Extent, k: Extent, dispatcher: Dispatcher):
    """Loads of one work tile; the ticket for the next tile is taken before the last V."""
    # Q in shared memory is free only when the tile before is done: its K must not wait for that.
    keys_first = dispatcher.tiles.query_source is QuerySource.SHARED
    if const_expr(keys_first):
        load.k.load(blocks.first, kv_head, k)
    load_queries(load.q, tile, q, dispatcher.tiles)
    if const_expr(not keys_first):
        load.k.load(blocks.first, kv_head, k)
    for i in cutlass.range(blocks.count - 1, unroll=1):
        load.v.load(blocks.first - i, kv_head, k)
        load.k.load(blocks.first - i - 1, kv_head, k)
    dispatcher.prefetch()
    load.v.load(blocks.first - blocks.count + 1, kv_head, k)
    return load, dispatcher


@cute.jit
def load_queries(load: StagedLoad, tile: WorkTile, q: Extent, tiles: cutlass.Constexpr[Tiles]):
    """A stage for each consumer's rows: who is done with the last tile's need not wait for the others."""
    for consumer in cutlass.range_constexpr(tiles.consumers):
        block = tile.q_block * tiles.consumers + consumer
        if const_expr(load.layout.kind is not SequenceKind.DENSE):
            block = cutlass.min(block, last_block(q.length, ROWS_PER_CONSUMER // tiles.heads))
        load.load(block, tile.head, q)


class Forward:
    """Host side and kernel of one (ForwardSpec, Tiles)."""

    def __init__(self, spec: ForwardSpec, tiles: Tiles):
        self.spec, self.tiles = spec, tiles

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, mLSE, mSink, mCounter, q_arrays: Arrays, k_arrays: Arrays, numbers: Numbers, stream):
        spec, tiles = self.spec, self.tiles
        q, o = (rows_view(m, spec.q_layout, tiles.heads) for m in (mQ, mO))
        k, v = (rows_view(m, spec.k_layout) for m in (mK, mV))
        batch = self.batch(mQ, mK, q_arrays, k_arrays)
        first_level = numbers.first_level if is_ragged(spec) else None
        sizes = Sizes(mQ.shape[-3], mK.shape[-3], mQ.shape[-2] // tiles.heads, batch, numbers.head_group, first_level)
        mask = MaskNumbers(numbers.left, numbers.right, numbers.chunk, numbers.q_offset, numbers.k_offset, numbers.bottom_right)
        ops = Operands(
            storage.tma_load(q, storage.q_layout(spec, ROWS_PER_CONSUMER), (storage.query_rows(tiles, ROWS_PER_CONSUMER), spec.qk_width)),
            storage.tma_load(k, storage.k_layout(spec, tiles, 1), (tiles.kv, spec.qk_width)),
            storage.tma_load(v, storage.v_layout(spec, tiles, 1), (tiles.kv, spec.v_width)),
            storage.tma_store(o, storage.o_layout(spec, tiles, ROWS_PER_CONSUMER), storage.output_tile(tiles)),
            None if spec.q_layout.kind is SequenceKind.DENSE else mO,
            mLSE,
            mSink,
            mCounter,
            sequence_arrays(q_arrays),
            sequence_arrays(k_arrays),
            sizes,
            mask,
            numbers.scale_log2,
            numbers.tanh_scale,
        )
        most_tiles = cute.ceil_div(sizes.q_len, tiles.queries) * sizes.heads * batch
        if const_expr(spec.q_layout.kind is SequenceKind.PACKED):  # q_len is that of all sequences together
            most_tiles = (sizes.q_len // tiles.queries + batch) * sizes.heads
        grid = cutlass.min(most_tiles, numbers.multiprocessors)
        # Without min_blocks_per_mp ptxas ignores setmaxnreg.
        self.kernel(ops).launch(
            grid=[grid, 1, 1],
            block=[tiles.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def batch(self, mQ, mK, q_arrays, k_arrays):
        """How many sequences: from the side that says so by its shape or its arrays."""
        for m, arrays, layout in ((mQ, q_arrays, self.spec.q_layout), (mK, k_arrays, self.spec.k_layout)):
            if layout.kind is SequenceKind.DENSE:
                return m.shape[0]
            if layout.kind is SequenceKind.PADDED:
                return arrays.lengths.shape[0]
        return q_arrays.starts.shape[0] - 1

    @cute.kernel
    def kernel(self, ops: Operands):
        spec, tiles = self.spec, self.tiles
        thread, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(thread // roles.WARPGROUP_THREADS)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sQ, sK, sV, sO = self.buffers(smem)
        q_pipe = tma_pipe(smem, 1, tiles.consumers, spec.dtype.bytes * ROWS_PER_CONSUMER * spec.qk_width)
        k_pipe = tma_pipe(smem, tiles.consumers, tiles.stages, spec.dtype.bytes * tiles.kv * spec.qk_width)
        v_pipe = tma_pipe(smem, tiles.consumers, tiles.stages, spec.dtype.bytes * tiles.kv * spec.v_width)
        box, work_in, work_out = work_pipe(smem, tiles, budget.work_words(spec))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warpgroup == roles.PRODUCER_WARPGROUP:
            cute.arch.setmaxregister_decrease(roles.producer_registers(tiles))
            if warp == 0:
                shape = (storage.query_rows(tiles, ROWS_PER_CONSUMER), spec.qk_width)
                rows = cute.local_tile(sQ, (ROWS_PER_CONSUMER, spec.qk_width), (None, 0, 0))
                load = Loads(
                    StagedLoad(ops.q.atom, ops.q.tma_tensor, rows, q_pipe.make_producer(), shape, spec.q_layout),
                    StagedLoad(ops.k.atom, ops.k.tma_tensor, sK, k_pipe.make_producer(), (tiles.kv, spec.qk_width), spec.k_layout),
                    StagedLoad(ops.v.atom, ops.v.tma_tensor, sV, v_pipe.make_producer(), (tiles.kv, spec.v_width), spec.k_layout),
                )
                work = self.dispatcher(ops, box, work_in, thread)
                while work.tile.valid:
                    tile = work.tile
                    q, k = work.extents(tile.batch)
                    blocks = as_int32(self.walk(ops, tile, q.length, k.length).of_tile())
                    k = loadable(k) if const_expr(spec.k_layout.kind is not SequenceKind.DENSE) else k
                    load, work = produce(load, blocks, tile, tile.head // (spec.heads_per_kv // tiles.heads), q, k, work)
                    work.advance()
                load.k.producer.tail()
                load.v.producer.tail()
                load.q.producer.tail()
            elif const_expr(spec.q_layout.kind is not SequenceKind.DENSE):
                self.clear(ops, warp - 1, thread % 32)
        else:
            cute.arch.setmaxregister_increase(roles.consumer_registers(tiles))
            me = warpgroup - roles.FIRST_CONSUMER_WARPGROUP
            thread = thread - roles.WARPGROUP_THREADS
            c, store = self.consumer(ops, sQ, sK, sV, sO, q_pipe, k_pipe, v_pipe, thread, me)
            if const_expr(tiles.turns is Turns.PING_PONG):
                if me == tiles.consumers - 1:  # the first turn is consumer 0's
                    c.turn.pass_on()
            work = Follower.create(box, work_out, spec)
            work.advance()
            while work.tile.valid:
                tile = work.tile
                extent, k_len = self.lengths(ops, tile)
                c.mask.tile_query = tile.q_block * tiles.queries
                if const_expr(spec.is_ragged):
                    c.mask.q_len, c.mask.k_len = extent.length, k_len
                c.queries.take()
                blocks = as_int32(self.walk(ops, tile, extent.length, k_len).of_consumer(me))
                c = attend(c, blocks, consumers_part(spec, tiles))
                inverse, lse = c.softmax.finish(self.sink_log2(ops, tile, store), spec.sink)
                store.write_output(c.O, inverse, tile, extent)
                if const_expr(spec.lse):
                    store.write_lse(lse, tile, extent)
                work.advance()
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def clear(self, ops: Operands, spare: Int32, lane):
        """What a spare warp of the producer's warpgroup does."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        clear_gaps(ops, block * SPARE_WARPS + spare, grid * SPARE_WARPS, lane, self.spec)

    def buffers(self, smem: SmemAllocator):
        spec, tiles = self.spec, self.tiles

        def buffer(element, layout):
            return smem.allocate_tensor(element, layout.outer, budget.ALIGNMENT_BYTES, swizzle=layout.inner)

        element = storage.ELEMENTS[spec.dtype]
        sQ = buffer(element, storage.q_layout(spec, tiles.q))
        sK = buffer(element, storage.k_layout(spec, tiles, tiles.stages))
        sV = buffer(element, storage.v_layout(spec, tiles, tiles.stages))
        sO = buffer(storage.ELEMENTS[spec.out_dtype], storage.o_layout(spec, tiles, tiles.q))
        return sQ, sK, sV, sO

    def walk(self, ops: Operands, tile: WorkTile, q_len, k_len) -> Walk:
        bounds = bounds_of(ops.mask, q_len, k_len)
        return Walk(self.spec, self.tiles, tile.q_block, k_len, bounds, cutlass.min, cutlass.max)

    def lengths(self, ops: Operands, tile: WorkTile) -> tuple[Extent, Int32]:
        """What a consumer must know: where the queries lie, and how many keys there are."""
        if not self.spec.is_ragged:
            return Extent(tile.batch, Int32(0), ops.sizes.q_len), ops.sizes.k_len
        row = Int32(0) if self.spec.q_layout.kind is SequenceKind.PACKED else tile.batch
        return Extent(row, tile.q_start, tile.q_len), tile.k_len

    def sink_log2(self, ops: Operands, tile: WorkTile, store: OutputStore) -> tuple:
        """For each of a thread's rows."""
        if not self.spec.sink:
            return (Float32(0.0),) * ROWS_PER_THREAD
        return tuple(ops.sink[store.head_of(tile, r)] * Float32(LOG2_E) for r in range(ROWS_PER_THREAD))

    def dispatcher(self, ops: Operands, box, producer, lane) -> Dispatcher:
        """With its first tile, which the consumers have been told. A dataclass that a loop carries is rebound in place, for its other
        users too: so it gets copies."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        level = ops.sizes.first_level if is_ragged(self.spec) else 0
        start = Position(Int32(level), Int32(0), Int32(0), Int32(0))
        arrays = replace(ops.q_arrays), replace(ops.k_arrays), replace(ops.sizes)
        nothing = Follower.create(box, None, self.spec).tile
        work = Dispatcher(nothing, Int32(0), start, box, producer, grid, lane, ops.counter, *arrays, self.spec, self.tiles)
        work.send(block)
        return work

    def consumer(self, ops, sQ, sK, sV, sO, q_pipe, k_pipe, v_pipe, thread, me):
        spec, tiles = self.spec, self.tiles
        qk, pv = storage.scores_mma(spec, tiles), storage.output_mma(spec, tiles)
        o_part = pv.get_slice(thread)
        sVt = storage.transposed(sV, spec.v_width, tiles.kv, tiles.stages)
        lane = thread % 32
        first_row = thread // 32 * 16 + lane // LANES_PER_ROW

        def stats():
            return cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

        keys = [operand(qk, sK, spec, tiles.kv // tiles.parts, part, thread) for part in range(tiles.parts)]
        left_qk = left_keys = None
        if tiles.first_block is FirstBlock.HALF:
            left_qk = storage.scores_mma(spec, tiles, tiles.kv // 2)
            left_keys = operand(left_qk, sK, spec, tiles.kv // 2, 0, thread)
        kind = {Overlap.SOFTMAX_UNDER_PV: Consumer, Overlap.IN_ORDER: InOrderConsumer}[tiles.overlap]
        turn = {Turns.PING_PONG: Turn, Turns.FREE: NoTurn}[tiles.turns]
        c = kind(
            queries=make_queries(qk, sQ, own_stage(q_pipe, tiles.consumers, me), thread, spec, tiles),
            keys=StagedRead(tuple(keys), k_pipe.make_consumer()),
            values=StagedRead(pv.make_fragment_B(o_part.partition_B(sVt)), v_pipe.make_consumer()),
            scores=ScoreMap(ops.tanh_scale, spec),
            softmax=OnlineSoftmax(stats(), stats(), ops.scale_log2, spec, tiles),
            turn=turn(me, (me + 1) % tiles.consumers),
            mask=FragmentMask(
                tiles.query_of(first_row),
                2 * (lane % LANES_PER_ROW),
                Int32(0),
                ops.sizes.q_len,
                ops.sizes.k_len,
                replace(ops.mask),
                spec,
                tiles,
            ),
            O=cute.make_rmem_tensor(o_part.partition_shape_C((tiles.q, spec.v_width)), Float32),
            P=o_part.make_fragment_A(o_part.partition_shape_A((tiles.q, tiles.kv))),
            qk=qk,
            pv=pv,
            left_keys=left_keys,
            left_qk=left_qk,
            tiles=tiles,
        )
        return c, OutputStore.create(ops, sO, thread, me, first_row, spec, tiles)


def operand(qk, sK, spec: ForwardSpec, keys: int, part: int, thread):
    """The B operand of S = Q·Kᵀ for so many keys of a block, over the stages."""
    return qk.make_fragment_B(qk.get_slice(thread).partition_B(cute.local_tile(sK, (keys, spec.qk_width), (part, 0, None))))


def as_int32(numbers):
    """A dataclass of plain arithmetic, ready to enter a loop."""
    return replace(numbers, **{f.name: Int32(getattr(numbers, f.name)) for f in fields(numbers)})
