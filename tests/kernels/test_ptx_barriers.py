"""The emulated GPU's warps that wait for one another: numbered barriers, mbarriers, and what is known after them."""

import re

import pytest
import torch

from .ptx.conflicts import ConflictError
from .ptx.instructions.barriers import BarrierError
from .ptx.launch import DeadlockError
from .ptx.memory import IllegalAccessError
from .ptx.snippets import emulate
from .ptx.threads import DivergenceError

# The first warp does one thing and the others another; `%r2` is a thread's place, `%r4` its place in the other warp.
APART = """
    setp.lt.u32 %p1, %r0, 32; shl.b32 %r2, %r0, 2; xor.b32 %r4, %r2, 128; @!%p1 bra $L__others;
    {} bra $L__end;
$L__others:
    {}
$L__end:
"""
WAIT = """
{{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [{}], {};
    @!complete bra.uni waitLoop;
}}
"""
READY, FREE = 1024, 1032
INIT = f"""
    setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [{READY}], 32;
    @%p2 mbarrier.init.shared::cta.b64 [{FREE}], 32; barrier.sync 1;
"""


def run(body: str, num_threads: int = 64, num_ctas: int = 1) -> torch.Tensor:
    """What each thread of the second tensor's rows was given; the first's are numbers."""
    numbers, result = torch.arange(num_threads * num_ctas), torch.zeros(num_threads * num_ctas, dtype=torch.int32)
    given = numbers.int(), result
    emulate(body, *given, num_threads=num_threads, num_ctas=num_ctas, shared_bytes=2048)
    return result


SAID = "ld.global.b32 %r3, [%a0]; st.shared.b32 [%r2], %r3; {}"
HEARD = "{} ld.shared.b32 %r5, [%r4]; st.global.b32 [%a1], %r5;"


@pytest.mark.parametrize("wait", ["bar.sync 1, 64;", "barrier.sync 1, 64;", "barrier.sync 1;"])
def test_warps_meet_at_a_barrier_from_different_places(wait):
    body = APART.format(SAID.format(wait), HEARD.format(wait))
    assert run(body, num_ctas=2).view(2, 2, 32)[:, 1].tolist() == [list(range(32)), list(range(64, 96))]
    with pytest.raises(ConflictError, match="warp 1 of program 0 reads what warp 0 of program 0 wrote"):
        run(APART.format(SAID.format(""), HEARD.format("")))


def test_a_barrier_orders_only_those_that_meet_there():
    """Of four warps two and two meet, in either of two ways."""
    meeting = "shr.u32 %r6, %r0, {}; and.b32 %r6, %r6, 1; add.u32 %r6, %r6, 1; bar.sync %r6, 64;"
    body = "shl.b32 %r2, %r0, 2; xor.b32 %r4, %r2, 128; st.shared.b32 [%r2], %r0; {} ld.shared.b32 %r5, [%r4];"
    run(body.format(meeting.format(6)), num_threads=128)
    with pytest.raises(ConflictError, match="reads what warp"):
        run(body.format(meeting.format(5)), num_threads=128)


def test_who_only_arrives_is_heard_and_hears_nothing():
    arrive, sync = "bar.arrive 1, 64;", "bar.sync 1, 64;"
    assert run(APART.format(SAID.format(arrive), HEARD.format(sync)))[32:].tolist() == list(range(32))
    with pytest.raises(ConflictError, match="warp 1 of program 0 writes what warp 0 of program 0 read"):
        run(APART.format(HEARD.format(arrive), SAID.format(sync)))


def test_who_has_returned_is_not_waited_for_at_a_numbered_barrier():
    assert run(APART.format("barrier.sync 2; st.global.b32 [%a1], 1;", "ret;")).tolist() == [1] * 32 + [0] * 32


def test_who_waits_in_vain_is_named():
    with pytest.raises(DeadlockError, match=re.escape("warps 0 of program 0 wait in vain for bar.sync 1, 64")):
        run(APART.format("bar.sync 1, 64;", "bar.arrive 2, 64;"))
    waiting = INIT + APART.format("", WAIT.format(READY, 0))
    with pytest.raises(DeadlockError, match=r"warps 1 of program 0; .* vain for mbarrier.* at byte 1024 of shared"):
        run(waiting, num_ctas=2)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (APART.format("bar.sync 1, 64;", "bar.sync 1, 96;"), BarrierError, "a barrier of 64 threads is one of 96"),
        ("setp.lt.u32 %p1, %r0, 40; @%p1 bar.sync 1, 64;", DivergenceError, "not all of 32 threads"),
        (f"mbarrier.arrive.shared::cta.b64 _, [{READY}];", IllegalAccessError, "no mbarrier at byte 1024"),
        (
            f"{INIT} mbarrier.arrive.shared::cta.b64 _, [{READY}], 2;",
            BarrierError,
            "more arrive at the mbarrier at byte",
        ),
    ],
)
def test_a_barrier_that_is_used_wrongly(body, error, message):
    with pytest.raises(error, match=message):
        run(body)


RING = """
    mov.b32 %r9, 0; mov.b32 %r10, 0;
{loop}:
    and.b32 %r11, %r9, 1; xor.b32 %r12, %r11, 1;
    {work}
    add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 5; @%p3 bra {loop};
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [{}];"
PRODUCE = (
    WAIT.format(FREE, "%r12"),
    "mul.lo.u32 %r3, %r0, 10; add.u32 %r3, %r3, %r9; st.shared.b32 [%r2], %r3;",
    ARRIVE.format(READY),
)
CONSUME = (
    WAIT.format(READY, "%r11"),
    "ld.shared.b32 %r5, [%r4]; mad.lo.u32 %r10, %r10, 10, %r5;",
    ARRIVE.format(FREE),
)


def ring(produce: tuple[str, ...], consume: tuple[str, ...]) -> torch.Tensor:
    """One warp hands five numbers to the other, by one place."""
    producer = RING.format(loop="$L__produce", work="".join(produce))
    consumer = RING.format(loop="$L__consume", work="".join(consume))
    return run(INIT + APART.format(producer, consumer + "st.global.b32 [%a1], %r10;"), num_ctas=3).view(3, 2, 32)[:, 1]


def test_phases_hand_numbers_from_warp_to_warp():
    expected = [111110 * lane + 1234 for lane in range(32)]
    assert ring(PRODUCE, CONSUME).tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("produce", "consume", "message"),
    [
        # The phase that is waited for is over, and so is the one after it.
        (PRODUCE[1:], CONSUME, "warps 1 of program 0; .* wait in vain"),
        (PRODUCE, CONSUME[1:], "reads what warp 0"),
        (PRODUCE, (CONSUME[0], CONSUME[2], CONSUME[1]), "warp 1 of program . reads what warp 0"),
    ],
    ids=["free is not waited for", "ready is not waited for", "free is said too early"],
)
def test_a_wait_that_is_missing_is_seen(produce, consume, message):
    with pytest.raises((ConflictError, DeadlockError), match=message):
        ring(produce, consume)


def test_an_mbarrier_is_there_for_who_knows_that_it_is():
    body = "setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [1024], 64; {}" + ARRIVE.format(READY)
    run(body.format("barrier.sync 1;") + f"barrier.sync 1; @%p2 mbarrier.inval.shared::cta.b64 [{READY}];")
    with pytest.raises(ConflictError, match="warp 1 of program 0 updates what warp 0 of program 0 wrote"):
        run(body.format(""))


COPY = f"""
    cp.async.ca.shared.global [%r2], [%a0], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [{READY}]; {{}}
"""


def test_copies_arrive_at_an_mbarrier():
    """As late as they may; without `noinc` an arrival more is awaited."""
    see = "ld.shared.b32 %r5, [%r2]; st.global.b32 [%a1], %r5;"
    with pytest.raises(ConflictError, match="a copy by warp 0 of program 0 writes what warp 0 of program 0 read"):
        run(INIT + APART.format(COPY.format(see), ""))
    assert run(INIT + APART.format(COPY.format(WAIT.format(READY, 0) + see), ""))[:32].tolist() == list(range(32))
    more = COPY.replace(".noinc", "").format(ARRIVE.format(READY))
    heard = HEARD.format(WAIT.format(READY, 0))
    assert run(INIT + APART.format(more, heard))[32:].tolist() == list(range(32))


def test_who_has_heard_of_copies_knows_of_them_and_of_nothing_else():
    """Not what was stored beside them; and who waits for them itself may tell others too."""
    heard, stored = HEARD.format(WAIT.format(READY, 0)), "st.shared.b32 [%r2+256], 7;"
    assert run(INIT + APART.format(COPY.format(""), heard))[32:].tolist() == list(range(32))
    with pytest.raises(ConflictError, match="a copy by warp 0 of program 0 writes what warp 1 of program 0 read"):
        run(INIT + APART.format(COPY.format(""), HEARD.format("")))
    with pytest.raises(ConflictError, match=r"reads what warp 0 .* in shared memory at byte 256"):
        run(INIT + APART.format(stored + COPY.format(""), heard.replace("[%r4]", "[%r4+256]")))
    told = COPY.format("cp.async.wait_all; bar.sync 2, 64;"), HEARD.format("bar.sync 2, 64;")
    assert run(INIT + APART.format(*told))[32:].tolist() == list(range(32))


def test_one_lane_is_elected():
    body = "elect.sync %r3|%p1, -1; selp.b32 %r4, 1, 0, %p1; add.u32 %r4, %r4, %r3; st.global.b32 [%a1], %r4;"
    assert run(body).tolist() == ([1] + [0] * 31) * 2


def test_warps_go_where_a_list_says():
    """As Triton has them choose their part; two statements stand in one line, and registers are as many as it takes."""
    body = """
        shr.u32 %r3, %r0, 5; setmaxnreg.dec.sync.aligned.u32 24;
        $L_brx_0: .branchtargets
            $L__one,
            $L__two,
            $L__one;
        brx.idx %r3, $L_brx_0;
    $L__one:
        griddepcontrol.wait; mov.u32 %r4, 10;
        bra $L__end;
    $L__two:
        mov.u32 %r4, 20;
    $L__end:
        shl.b32 %r2, %r0, 2; add.u32 %r5, %r2, 8; st.shared.b32 [%r5+-8], %r4; ld.shared.b32 %r4, [%r2];
        add.u32 %r4, %r4, %r3; st.global.b32 [%a1], %r4;
    """
    assert run(body, num_threads=96).view(3, 32)[:, 0].tolist() == [10, 21, 12]


def test_programs_whose_warps_meet_by_numbers_are_ordered_by_atomics():
    body = """
        ld.param.b64 %rd0, [snippet_param_1]; ld.param.b64 %rd1, [snippet_param_0]; st.global.b32 [%a1], 7;
        barrier.sync 1; mov.u32 %r4, %tid.x; setp.eq.u32 %p2, %r4, 0; mov.u32 %r5, 0;
        @%p2 atom{}.global.gpu.add.u32 %r5, [%rd1], 1; barrier.sync 1;
        setp.eq.u32 %p1, %r5, 2; @%p1 ld.global.b32 %r3, [%rd0]; @%p1 ld.global.b32 %r6, [%rd0+256];
        @%p1 add.u32 %r3, %r3, %r6; @%p1 st.global.b32 [%rd0], %r3;
    """
    assert run(body.format(".acq_rel"), num_ctas=3)[0] == 14
    with pytest.raises(ConflictError, match="reads what"):
        run(body.format(".relaxed"), num_ctas=3)
