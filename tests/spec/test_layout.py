"""Layouts: the string, the defaults that follow from other fields, and every rule with its sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.schedule.schedules import make_schedule
from cuboid.spec.fitting import check
from cuboid.spec.layout import CONTEXT_METHODS, SCHEDULES, Layout
from cuboid.spec.model import load_model

LLAMA = load_model("tiny-llama")
GPT2 = load_model("tiny-gpt2")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degree = st.sampled_from([1, 2, 3, 4, 8])
    schedule = draw(st.sampled_from(SCHEDULES))
    dp, zero = draw(degree), draw(st.integers(0, 3))
    ep = draw(st.sampled_from([1, dp]))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    return Layout(
        dp=dp,
        tp=draw(degree),
        pp=draw(degree),
        cp=draw(degree),
        ep=ep,
        zero=zero,
        shard=draw(st.sampled_from([0, 1, dp] if ep == 1 else [0, dp])) if zero else 0,
        schedule=schedule,
        micro_batch=draw(degree),
        cp_method=draw(st.sampled_from(["ring", "ulysses", "allgather"])),
        recompute=recompute,
        recompute_layers=0 if recompute == "none" else draw(st.integers(0, 9)),
        **({"vpp": draw(st.integers(2, 4))} if schedule == "interleaved" else {}),
        **({"sequence_parallel": draw(st.booleans())} if draw(st.booleans()) else {}),
    )


@given(layouts())
def test_string_round_trips(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_string_leaves_defaults_out() -> None:
    assert str(Layout()) == "dp=1,tp=1,pp=1"
    assert str(Layout.parse("tp=2, schedule=zbv ,dp=4,zero=3,vpp=2")) == "dp=4,tp=2,pp=1,zero=3,schedule=zbv"
    assert str(Layout(tp=2, sequence_parallel=False)) == "dp=1,tp=2,pp=1,sequence_parallel=false"
    full = "dp=2,tp=2,pp=2,zero=1,schedule=1f1b,vpp=1,micro_batch=1,recompute=none"
    assert str(Layout.parse(full)) == "dp=2,tp=2,pp=2,zero=1"


def test_left_out_fields_follow_the_others() -> None:
    assert [Layout(schedule=schedule).vpp for schedule in SCHEDULES] == [1, 1, 2, 1, 2, 2]
    assert Layout(tp=2).sequence_parallel is True
    assert Layout(tp=1, sequence_parallel=True).sequence_parallel is False
    assert Layout(pp=4, schedule="interleaved", vpp=3).stages == 12
    assert Layout(dp=2, cp=3, tp=5, pp=7).world_size == 210
    assert [Layout(cp=8, cp_method=method).cp_inner for method in CONTEXT_METHODS] == [1, 8, 1, 4]
    assert Layout(cp_method="ulysses") == Layout()
    assert str(Layout(cp=8, cp_method="hybrid")) == "dp=1,tp=1,pp=1,cp=8,cp_method=hybrid"
    assert str(Layout(cp=8, cp_method="hybrid", cp_inner=2)) == "dp=1,tp=1,pp=1,cp=8,cp_method=hybrid,cp_inner=2"


def test_shard_size_says_how_many_ranks_split_state() -> None:
    assert Layout(dp=8).shard_size == 1
    assert Layout(dp=8, zero=1).shard_size == 8
    assert Layout(dp=8, zero=3, shard=2).shard_size == 2


def test_last_stage_sits_on_the_first_rank_of_v_schedules() -> None:
    assert Layout(pp=4).last_stage_rank == 3
    assert Layout(pp=4, schedule="interleaved").last_stage_rank == 3
    assert Layout(pp=4, schedule="zbv").last_stage_rank == 0


@given(layouts())
def test_stages_sit_where_the_schedules_put_them(layout: Layout) -> None:
    schedule = make_schedule(layout.schedule, layout.pp, 2, layout.vpp)
    assert [layout.stages_of(rank) for rank in range(layout.pp)] == [
        tuple(stage for stage, holder in enumerate(schedule.stage_rank) if holder == rank) for rank in range(layout.pp)
    ]


def test_layers_are_as_they_are_written() -> None:
    layout = Layout.parse("pp=4,layers=4:4:4:2")
    assert (layout.layers, str(layout)) == ((4, 4, 4, 2), "dp=1,tp=1,pp=4,layers=4x3:2")
    assert str(Layout.parse("pp=2,schedule=zbv,layers=2:4:6:2")) == "dp=1,tp=1,pp=2,schedule=zbv,layers=2:4:6:2"
    assert layout.changed(dp=2).layers == layout.layers
    assert Layout(pp=2, layers=[3, 1]).layers == (3, 1)  # type: ignore[arg-type]


def test_weights_are_one_proportion() -> None:
    assert str(Layout.parse("dp=2,batch_weights=6:2")) == "dp=2,tp=1,pp=1,batch_weights=3:1"
    assert str(Layout.parse("dp=6,batch_weights=2x4:1:1")) == "dp=6,tp=1,pp=1,batch_weights=2x4:1:1"
    assert Layout.parse("dp=2,batch_weights=5:5") == Layout(dp=2)
    assert Layout(dp=2, batch_weights=[3, 1]).batch_weights == (3, 1)  # type: ignore[arg-type]


def test_shards_by_weight() -> None:
    layout = Layout.parse("dp=4,zero=3,shard=2,shard_weights=6:2")
    assert str(layout) == "dp=4,tp=1,pp=1,zero=3,shard=2,shard_weights=3:1"
    assert [layout.shard_weight_of(replica) for replica in range(4)] == [3, 1, 3, 1]
    assert layout.fuller_shard == 1.5
    assert (Layout(dp=2, zero=1).fuller_shard, Layout(dp=2, zero=1).shard_weight_of(1)) == (1.0, 1)


def test_replicas_divide_a_batch_by_weight() -> None:
    layout = Layout.parse("dp=3,micro_batch=2,batch_weights=3:1:2")
    assert [layout.sequences_of(replica, 24) for replica in range(3)] == [range(12), range(12, 16), range(16, 24)]
    assert [layout.micro_batches_of(replica, 24) for replica in range(3)] == [6, 2, 4]
    assert layout.as_replica(2, 24) == (Layout(dp=3, micro_batch=2), 24)
    assert Layout(dp=3, micro_batch=2).sequences_of(2, 24) == range(16, 24)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp=2", False),
        ("dp=2,zero=1", False),
        ("dp=2,zero=2", True),
        ("dp=2,ep=2", True),
        ("dp=2,tp=2,ep=2", False),  # experts of one replica
    ],
)
def test_replicas_that_wait_for_one_another_have_equally_many_micro_batches(text: str, sizes: bool) -> None:
    layout = Layout.parse(f"{text},batch_weights=3:1")
    assert (layout.has_unequal_sizes, layout.has_unequal_counts) == (sizes, not sizes)
    assert [layout.micro_batch_of(replica) for replica in (0, 1)] == ([3, 1] if sizes else [1, 1])
    assert [layout.micro_batches_of(replica, 8) for replica in (0, 1)] == ([2, 2] if sizes else [6, 2])


def test_only_those_of_unequal_weight_matter() -> None:
    assert Layout.parse("dp=4,zero=3,shard=2,batch_weights=2:2:1:1").has_unequal_counts
    assert Layout.parse("dp=4,zero=3,shard=2,batch_weights=2:1:2:1").has_unequal_sizes
    assert Layout.parse("dp=4,ep=2,batch_weights=2:2:1:1").has_unequal_counts


def test_changed_resolves_defaults_anew() -> None:
    layout = Layout(pp=2).changed(schedule="zbv", tp=2)
    assert (layout.vpp, layout.sequence_parallel) == (2, True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp=0", "dp=0 is not positive; use dp=1 or more"),
        ("tp=-2", "tp=-2 is not positive; use tp=1 or more"),
        ("tp=two", "tp=two has the wrong type; it must be an integer"),
        ("dp=2,tq=2", "unknown key tq; did you mean tp?"),
        ("dp=2,micro_batches=2", "unknown key micro_batches; did you mean micro_batch or batch_weights?"),
        ("dp", "layout part 'dp' is not key=value; write it like dp=2,tp=2,pp=2"),
        ("dp=2,dp=4", "layout names dp twice; keep one of dp=2 and dp=4"),
        ("schedule=1f2b", "unknown schedule=1f2b; use schedule=1f1b"),
        (
            "vpp=2",
            "vpp=2 needs an interleaved schedule and schedule=1f1b is not one; use schedule=interleaved or vpp=1",
        ),
        (
            "schedule=zb1p,vpp=3",
            "vpp=3 needs an interleaved schedule and schedule=zb1p is not one; use schedule=interleaved or vpp=1",
        ),
        (
            "schedule=interleaved,vpp=1",
            "vpp=1 leaves schedule=interleaved nothing to interleave; use vpp=2 or schedule=1f1b",
        ),
        ("schedule=zbv,vpp=1", "vpp=1 does not fit schedule=zbv, which has two stages per rank; use vpp=2"),
        ("dp=2,batch_weights=3", "batch_weights=3 has 1 weights for dp=2; use one for each replica"),
        (
            "dp=2,batch_weights=0:1",
            "batch_weights=0:1 has a weight that is not between 1 and 1048576; use 3:1 or the like",
        ),
        (
            "dp=2,batch_weights=a:1",
            "batch_weights=a:1 is no list of weights; write it like batch_weights=3:1 or batch_weights=3x4:1x2",
        ),
        (
            "dp=2,shard_weights=3:1",
            "shard_weights=3:1 has nothing to split with zero=0; use zero=1, zero=2 or zero=3",
        ),
        (
            "dp=4,zero=1,shard=2,shard_weights=3:1:3:1",
            "shard_weights=3:1:3:1 has 4 weights for shard=2; use one for each replica",
        ),
        ("layers=8", "layers=8 has nothing to divide with pp=1; use pp=2 or omit it"),
        (
            "pp=2,schedule=zbv,layers=4:4",
            "layers=4:4 has 2 numbers for 4 stages (pp=2 × vpp=2); use one for each stage",
        ),
        ("pp=3,layers=4:0:4", "layers=4:0:4 leaves stage 1 empty; use 1 or more for each"),
        ("pp=2,layers=4+4", "layers=4+4 is no list of numbers; write it like layers=3:1 or layers=3x4:1x2"),
        ("zero=4", "zero=4 is out of range; use zero=3"),
        ("zero=-1", "zero=-1 is out of range; use zero=0"),
        ("dp=4,zero=1,shard=3", "shard=3 does not divide dp=4; use shard=2 or shard=4"),
        ("dp=4,zero=1,shard=9", "shard=9 is out of range; use shard=4"),
        ("dp=4,shard=2", "shard=2 has nothing to split with zero=0; use zero=1, zero=2 or zero=3"),
        ("recompute=some", 'recompute="some" is unknown; use none, selective or full'),
        (
            "recompute=full,recompute_layers=-2",
            "recompute_layers=-2 is negative; use recompute_layers=1 or more, or 0 for all",
        ),
        (
            "recompute_layers=2",
            "recompute_layers=2 has nothing to do with recompute=none; use recompute=selective or recompute=full",
        ),
        (
            "sequence_parallel=on",
            "sequence_parallel=on is not true or false; use sequence_parallel=true or sequence_parallel=false",
        ),
        ("cp=4,cp_method=rings", 'cp_method="rings" is unknown; use ring, ulysses, allgather or hybrid'),
        ("cp=3,cp_method=hybrid", "cp_method=hybrid has nothing to divide in cp=3; use cp=4 or cp_method=ring"),
        ("cp=8,cp_method=hybrid,cp_inner=3", "cp_inner=3 is no part of cp=8; use cp_inner=2 or cp_inner=4"),
        ("cp=8,cp_inner=4", "cp_inner=4 needs cp_method=hybrid, not ring; omit it"),
        ("dp=4,ep=3", "ep=3 does not divide dp × cp × tp = 4; use ep=2 or ep=4"),
    ],
)
def test_bad_strings_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Layout.parse(text)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("value", [True, "2", 2.0, None])
def test_degrees_are_integers_only(value: object) -> None:
    with pytest.raises(UserError, match=r"tp=.* it must be an integer"):
        Layout(tp=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tp=3", "tp=3 does not divide heads=8; use tp=2 or tp=4"),
        ("tp=16", "tp=16 does not divide heads=8; use tp=8"),
        ("pp=9", "pp=9 makes more stages than layers=8; use pp=8"),
        ("pp=2,layers=4:5", "layers=4:5 are 9 layers and tiny-llama has 8; use 2 numbers with that sum"),
        (
            "pp=2,layers=6:2,recompute=full,recompute_layers=6",
            "recompute_layers=6 covers every layer of the longest stage, which has 6; "
            "use recompute_layers=5 or less, or 0 for all",
        ),
        (
            "pp=2,recompute=full,recompute_layers=4",
            "recompute_layers=4 covers every layer of the longest stage, which has 4; "
            "use recompute_layers=3 or less, or 0 for all",
        ),
        (
            "pp=8,recompute=full,recompute_layers=3",
            "recompute_layers=3 covers every layer of the longest stage, which has 1; use recompute_layers=0",
        ),
        ("pp=8,schedule=interleaved", "pp=8 × vpp=2 makes more stages than layers=8; use pp=4"),
        ("dp=3", "global_batch=16 does not divide by dp=3 × micro_batch=1; use global_batch=15 or global_batch=18"),
        ("dp=32", "global_batch=16 does not divide by dp=32 × micro_batch=1; use global_batch=32"),
        ("ep=2,dp=2", "ep=2 needs experts and tiny-llama has none; use ep=1"),
        (
            "cp=3",
            "sequence=256 does not divide into the 2 × cp = 6 chunks that give every rank equal work; "
            "use sequence=252 or sequence=258",
        ),
        (
            "cp=16,cp_method=ulysses",
            "cp=16 does not divide heads=8, which cp_method=ulysses shards; use cp=8 or cp_method=ring",
        ),
        (
            "cp=8,tp=2,cp_method=ulysses",
            "cp=8 does not divide heads=8 / tp=2, which cp_method=ulysses shards; use cp=4 or cp_method=ring",
        ),
        (
            "cp=12,cp_method=hybrid,cp_inner=3",
            "cp_inner=3 does not divide heads=8, which cp_method=hybrid shards; "
            "use cp_inner=2, cp_inner=4 or cp_method=ring",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        check(Layout.parse(text), LLAMA, global_batch=16, sequence=256)
    assert str(refusal.value) == sentence


def test_suggested_tensor_degrees_fit_heads_and_ffn() -> None:
    odd_ffn = load_model("tiny-llama").__class__(hidden=96, layers=2, heads=12, ffn=90, vocab=7)
    with pytest.raises(UserError, match=r"tp=4 does not divide ffn=90; use tp=3 or tp=6"):
        check(Layout(tp=4), odd_ffn, global_batch=16, sequence=256)


def test_sequence_parallel_needs_tokens_that_divide() -> None:
    sentence = r"micro_batch=1 × sequence=31 tokens .* use sequence=30, sequence=32 or sequence_parallel=false"
    with pytest.raises(UserError, match=sentence):
        check(Layout(tp=2), LLAMA, global_batch=16, sequence=31)
    check(Layout(tp=2, sequence_parallel=False), LLAMA, global_batch=16, sequence=31)
    check(Layout(tp=2, micro_batch=2), LLAMA, global_batch=16, sequence=31)


def test_learned_positions_bound_the_sequence() -> None:
    with pytest.raises(
        UserError, match=r"sequence=1025 is longer than max_positions=1024 of tiny-gpt2; use sequence=1024"
    ):
        check(Layout(), GPT2, global_batch=1, sequence=1025)
    check(Layout(), LLAMA, global_batch=1, sequence=4096)


def test_product_of_degrees_is_the_world_size() -> None:
    check(Layout(dp=2, tp=2, pp=2), LLAMA, global_batch=16, sequence=256, world_size=8)
    with pytest.raises(UserError, match=r"^dp=2 × tp=2 × pp=2 needs world_size=8, not 12; use dp=3 or start 8 ranks$"):
        check(Layout(dp=2, tp=2, pp=2), LLAMA, global_batch=16, sequence=256, world_size=12)
    with pytest.raises(UserError, match=r"^dp=2 × tp=2 × pp=2 needs world_size=8, not 6; start 8 ranks$"):
        check(Layout(dp=2, tp=2, pp=2), LLAMA, global_batch=16, sequence=256, world_size=6)


def test_key_value_heads_and_vocabulary_need_not_divide() -> None:
    assert LLAMA.kv_heads == 4 and LLAMA.vocab % 2 == 1
    check(Layout(tp=8), LLAMA, global_batch=16, sequence=256)


def test_offloading_is_written_where_it_is_asked_for() -> None:
    assert str(Layout.parse("offload=true,dp=2,zero=1")) == "dp=2,tp=1,pp=1,zero=1,offload=true"
    assert str(Layout.parse("dp=2,offload=false")) == "dp=2,tp=1,pp=1"
    with pytest.raises(UserError, match="offload"):
        Layout.parse("offload=cpu")


def test_the_first_layers_of_a_stage_are_recomputed_most() -> None:
    kinds = {"full": ["full", "full", "selective"], "selective": ["selective", "selective", "none"]}
    for kind, expected in kinds.items():
        layout = Layout.parse(f"recompute={kind},recompute_layers=2")
        assert [layout.recompute_at(place) for place in range(3)] == expected
        assert Layout.parse(f"recompute={kind}").recompute_at(7) == kind
    assert Layout().recompute_at(0) == "none"
    # Seven layers over two stages, of which the one without the head holds four.
    seven = load_model("tiny-llama").__class__(hidden=64, layers=7, heads=8, ffn=192, vocab=256)
    check(Layout(pp=2, recompute="full", recompute_layers=3), seven, global_batch=16, sequence=256)
