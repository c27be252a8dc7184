"""Rings of shared-memory stages between roles of a thread block: the only file with phase bits.

Each stage has two mbarriers. `full` completes when the producers' arrivals (as a rule one) and all
bytes that they announced have come; `empty` completes when every consumer has released the stage.
An mbarrier flips its phase bit each time it completes, and a wait names the bit of the phase that
must be over, so a cursor flips its bit each time it wraps. A producer starts with the bit flipped:
the first wait on every `empty` barrier returns at once.
"""

from tvm.script import tirx as T


@T.meta_class
class Ring:
    """Barriers of `stages` stages.

    Parameters
    ----------
    pool
        Shared-memory pool that the barriers are taken from.
    stages
        Stages of the ring, at least 1.
    releases
        Consumers that release a stage before it is filled again.
    fills
        Producers that fill a stage together.
    """

    def __init__(self, pool, stages, releases, fills=1):
        self.stages = stages
        self.releases = releases
        self.fills = fills
        self.full = pool.alloc((stages,), "uint64", align=8)
        self.empty = pool.alloc((stages,), "uint64", align=8)

    @T.inline
    def initialise(self):
        """Set the arrival counts; for one thread of the block, before any wait."""
        for s in T.unroll(self.stages):
            T.ptx.mbarrier.init.shared.b64(self.full.ptr_to([s]), T.uint32(self.fills))
            T.ptx.mbarrier.init.shared.b64(self.empty.ptr_to([s]), T.uint32(self.releases))

    def producer(self):
        """A cursor for the thread that fills the stages."""
        return Cursor(self, 1)

    def consumer(self):
        """A cursor for a warp that reads the stages."""
        return Cursor(self, 0)

    def producer_behind(self, cursor):
        """A cursor for the producers of a two-stage ring, one stage behind a consumer elsewhere."""
        return CursorBehind(self, cursor)


@T.meta_class
class Cursor:
    """Where one role stands in a ring: `stage`, and the phase bit that its next wait needs."""

    def __init__(self, ring, phase):
        self.ring = ring
        self.first_phase = phase
        self.stage = T.local_scalar("int32")
        self.phase = T.local_scalar("int32")
        self.start(phase)

    @T.inline
    def start(self, phase):
        """Stand at the first stage."""
        self.stage = 0
        self.phase = phase

    def fill(self):
        """The number of the fill that the cursor stands at, modulo twice the stages."""
        return self.stage + self.ring.stages * T.bitwise_xor(self.phase, self.first_phase)

    @T.inline
    def advance(self):
        """Go on to the next stage."""
        if self.ring.stages == 1:
            self.phase = T.bitwise_xor(self.phase, 1)
        else:
            self.stage = self.stage + 1
            if self.stage == self.ring.stages:
                self.stage = 0
                self.phase = T.bitwise_xor(self.phase, 1)

    @T.inline
    def acquire(self, transaction_bytes):
        """Producer: wait until the stage is free, then announce the bytes that will fill it."""
        T.cuda.mbarrier_wait(self.ring.empty.ptr_to([self.stage]), self.phase)
        T.ptx.mbarrier.arrive.expect_tx.shared.b64(
            self.ring.full.ptr_to([self.stage]), T.uint32(transaction_bytes)
        )

    @T.inline
    def acquire_plain(self):
        """Producer: wait until the stage is free; ordinary stores fill it until `commit`."""
        T.cuda.mbarrier_wait(self.ring.empty.ptr_to([self.stage]), self.phase)

    @T.inline
    def commit(self):
        """Producer: hand over a stage that ordinary stores filled."""
        T.ptx.mbarrier.arrive.shared.b64(self.ring.full.ptr_to([self.stage]), T.uint32(1))

    def barrier(self):
        """Producer: the barrier that the TMA loads of this stage complete on."""
        return self.ring.full.ptr_to([self.stage])

    @T.inline
    def wait(self):
        """Consumer: wait until the stage is full."""
        T.cuda.mbarrier_wait(self.ring.full.ptr_to([self.stage]), self.phase)

    @T.inline
    def release(self, lane):
        """Consumer: give the stage back, once for each warp."""
        if lane == 0:
            T.ptx.mbarrier.arrive.shared.b64(self.ring.empty.ptr_to([self.stage]), T.uint32(1))

    @T.inline
    def release_stage(self, stage, lane):
        """Consumer: give an earlier stage back, once for each warp."""
        if lane == 0:
            T.ptx.mbarrier.arrive.shared.b64(self.ring.empty.ptr_to([stage]), T.uint32(1))


@T.meta_class
class CursorBehind:
    """A producer's cursor that a consumer's tells: fill n comes when that has advanced n + 1 times.

    Both rings have two stages. It takes no registers, which are what a consumer is short of.
    """

    def __init__(self, ring, cursor):
        self.ring = ring
        self.cursor = cursor

    def stage(self):
        """The stage of fill n."""
        return T.bitwise_xor(self.cursor.stage, 1)

    @T.inline
    def acquire_plain(self):
        """Wait until the stage is free; ordinary stores fill it until `commit`."""
        phase = T.meta_var(T.bitwise_xor(self.cursor.phase, self.cursor.stage))
        T.cuda.mbarrier_wait(self.ring.empty.ptr_to([self.stage()]), phase)

    @T.inline
    def commit(self):
        """Hand the stage over."""
        T.ptx.mbarrier.arrive.shared.b64(self.ring.full.ptr_to([self.stage()]), T.uint32(1))
