"""What the emulated GPU says of CTAs, and of warps, that touch the same memory with nothing that orders them."""

import pytest
import torch

from .ptx.conflicts import ConflictError
from .ptx.snippets import emulate

# Each thread's own place of the first tensor, and that of all: `%rd0` is its address.
ALL = "ld.param.b64 %rd0, [snippet_param_0];"
FIRST_CTA = "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 0;"
FIRST_WARP = "setp.lt.u32 %p1, %r0, 32;"
# One thread of a CTA, once all are here, adds to the second tensor's first number; `%r5` is what there was.
ARRIVE = """
    bar.sync 0; mov.u32 %r4, %tid.x; setp.eq.u32 %p2, %r4, 0; ld.param.b64 %rd1, [snippet_param_1]; mov.u32 %r5, 0;
    @%p2 atom{}.global.gpu.add.u32 %r5, [%rd1], 1; bar.sync 0;
"""


def run(body: str, num_ctas: int = 1, num_threads: int = 64, shared_bytes: int = 4096) -> torch.Tensor:
    numbers, arrived = torch.zeros(num_ctas * num_threads, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tensors = numbers, arrived.expand(num_ctas * num_threads)
    emulate(body, *tensors, num_ctas=num_ctas, num_threads=num_threads, shared_bytes=shared_bytes)
    return numbers


BETWEEN_CTAS = {
    "two writes": (f"{ALL} st.global.b32 [%rd0], %r1;", "%a0 at byte 0"),
    "two equal writes": (f"{ALL} st.global.b32 [%rd0], 7;", "writes what .* of program . wrote"),
    "a write and reads": (
        f"{ALL} {FIRST_CTA} @%p1 st.global.b32 [%a0], 7; @!%p1 ld.global.b32 %r3, [%rd0];",
        "reads what warp 0 of program 0 wrote, with nothing between",
    ),
    "reads and a write": (
        f"{ALL} {FIRST_CTA} @!%p1 ld.global.b32 %r3, [%rd0]; @%p1 st.global.b32 [%a0], 7;",
        "program 0 writes what .* read",
    ),
    "a part of it": (
        f"{ALL} {FIRST_CTA} setp.eq.u32 %p2, %r1, 0; @%p2 st.global.v2.b32 [%rd0], {{%r1, %r1}}; "
        "@!%p1 ld.global.b8 %h1, [%rd0+7];",
        "%a0 at byte 4",
    ),
    "a barrier, which is of one": (f"{ALL} {FIRST_CTA} @%p1 st.global.b32 [%a0], 7; bar.sync 0; "
                                   "@!%p1 ld.global.b32 %r3, [%rd0];", "reads what"),
    "an addition and a read": (f"{ALL} {FIRST_CTA} @%p1 red.global.add.u32 [%rd0], 1; @!%p1 ld.global.b32 %r3, [%rd0];",
                               "reads what .* updated"),
    "an arrival that releases nothing": (
        f"{ALL} st.global.b32 [%a0], 7; {ARRIVE.format('.relaxed')} setp.eq.u32 %p1, %r5, 1; @%p1 ld.global.b32 %r3, "
        "[%rd0]; @%p1 ld.global.b32 %r3, [%rd0+256];", "reads what"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "message"), BETWEEN_CTAS.values(), ids=BETWEEN_CTAS)
def test_between_programs_nothing_is_ordered(body, message):
    with pytest.raises(ConflictError, match=message):
        run(body, num_ctas=2)


def test_a_place_of_its_own_for_each_program():
    got = run("st.global.b32 [%a0], %r1; ld.global.b32 %r3, [%a0]; st.global.b32 [%a0], %r3;", num_ctas=3)
    assert torch.equal(got, torch.arange(192, dtype=torch.int32))


def test_what_all_read_and_nobody_writes():
    run(f"{ALL} ld.global.b32 %r3, [%rd0]; ld.global.b32 %r3, [%rd0+4];", num_ctas=3)


def test_who_arrives_last_may_read_what_the_others_left():
    body = f"""
        {ALL} st.global.b32 [%a0], 7; {ARRIVE.format(".acq_rel")} setp.eq.u32 %p1, %r5, 2;
        @%p1 ld.global.b32 %r3, [%rd0]; @%p1 ld.global.b32 %r6, [%rd0+256]; @%p1 ld.global.b32 %r7, [%rd0+512];
        @%p1 add.u32 %r3, %r3, %r6; @%p1 add.u32 %r3, %r3, %r7; @%p1 st.global.b32 [%rd0], %r3;
    """
    assert run(body, num_ctas=3)[0] == 21


WITHIN_ONE = {
    "read": ("@%p1 st.{0} [{1}], 7; {2} @!%p1 ld.{0} %r3, [{1}];", "warp 1 of program 0 reads what warp 0 of"),
    "written": ("@%p1 ld.{0} %r3, [{1}]; {2} @!%p1 st.{0} [{1}], 7;", "warp 1 of program 0 writes what warp 0 of"),
    "written again": ("@%p1 st.{0} [{1}], 7; {2} @!%p1 st.{0} [{1}], 8;", "writes what warp 0 of program 0 wrote"),
    "read by all": ("ld.{0} %r3, [{1}]; {2} @%p1 st.{0} [{1}], 7;", "warp 0 of program 0 writes what warps of"),
}


@pytest.mark.parametrize("space", ["global.b32", "shared.b32"])
@pytest.mark.parametrize(("body", "message"), WITHIN_ONE.values(), ids=WITHIN_ONE)
def test_warps_are_ordered_by_barriers_alone(body, message, space):
    # Not by chance what is there already: all threads take the first one's number.
    place = "%rd0" if space == "global.b32" else "%r9"
    begin = f"{ALL} mov.u32 %r9, 0; {FIRST_WARP}"
    run(begin + body.format(space, place, "bar.sync 0;"))
    with pytest.raises(ConflictError, match=message):
        run(begin + body.format(space, place, ""))


def test_warps_may_say_the_same_in_shared_memory():
    run("mov.u32 %r9, 0; st.shared.b32 [%r9], 7; bar.sync 0; st.shared.b32 [%r9], 7; ld.shared.b32 %r3, [%r9];")


@pytest.mark.parametrize("place", ["[%rd0]", "[%r9]"])
def test_threads_of_a_warp_that_say_different_things(place):
    space = "global" if "rd" in place else "shared"
    with pytest.raises(ConflictError, match="threads write different numbers in one place"):
        run(f"{ALL} mov.u32 %r9, 0; st.{space}.b32 {place}, %r0;", num_threads=32)


def test_a_copy_is_its_threads_until_there_was_a_barrier():
    """Who waited for it knows that it is there, and the other warps do not."""
    body = """
        shl.b32 %r2, %r0, 2; cp.async.ca.shared.global [%r2], [%a0], 4; cp.async.commit_group;
        cp.async.wait_group 0; {} xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3]; st.global.b32 [%a0], %r4;
    """
    run(body.format("bar.sync 0;"))
    with pytest.raises(ConflictError, match=r"reads what warp . of program 0 wrote"):
        run(body.format(""))
