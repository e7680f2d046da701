"""What the leader decides, from what it heard and when: no process, no socket, no clock."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuboid.launch.coordinator import Coordinator, Order, Rules, Status
from cuboid.resilience.rebalance import Balance, Pace
from cuboid.resilience.replan import Choice, TooFew
from cuboid.spec.layout import Layout


class Story:
    """A coordinator whose nodes do what they are told; time passes when the story says so."""

    def __init__(self, least: int = 2, most: int = 4, ranks: int = 2, gather: float = 60.0) -> None:
        self.now, self.checkpoint, self.failures, self.verdict = 100.0, 0, list[tuple[str, str, str, str]](), ""
        self.states: dict[str, str] = {}
        self.silent: set[str] = set()

        def judge(*failure: str) -> str:
            self.failures.append(failure)  # type: ignore[arg-type]
            return self.verdict

        self.fewest, self.plans = 0, True

        def arrange(there: tuple[str, ...]) -> tuple[Choice, tuple[str, ...]] | None:
            members = there[:most]
            if len(members) < self.fewest:
                raise TooFew(f"{len(members)} nodes cannot hold it")
            nodes = len(members)
            return (Choice(nodes, ranks, f"dp={nodes * ranks}", f"{nodes} nodes"), members) if self.plans else None

        rules = Rules(least, most, lost_after=10.0, gather=gather, patience=600.0)
        self.room = True
        self.coordinator = Coordinator(
            "a", rules, arrange, judge, lambda: self.checkpoint, number=7, has_room=lambda: self.room
        )
        self.coordinator.meet_at("10.0.0.1", 4000)

    def arrive(self, *nodes: str) -> None:
        self.states |= dict.fromkeys(nodes, "")

    def passes(self, seconds: float) -> Order:
        """Everybody beats every second."""
        for _ in range(round(seconds)):
            self.now += 1
            self._speak()
        return self.coordinator.decide(self.now)

    def _speak(self) -> None:
        order = self.coordinator.decide(self.now)
        for node, state in self.states.items():
            if node not in self.silent:
                told = "training" if order.task == "train" and node in order.members else "ready"
                self.coordinator.hear(node, Status(order.number, state or told, "why"), self.now)  # type: ignore[arg-type]


def training(*nodes: str, least: int = 2, most: int | None = None) -> Story:
    story = Story(least, most or len(nodes))
    story.arrive(*nodes)
    assert story.passes(2).task == "train"
    return story


def test_a_full_job_starts_at_once_and_a_part_of_it_after_a_while() -> None:
    assert training("a", "b", "c", "d").coordinator.order.members == ("a", "b", "c", "d")
    story = Story()
    story.arrive("a", "b", "c")
    assert story.passes(50).task == "wait"
    order = story.passes(15)
    assert (order.task, order.members, order.layout, order.address, order.port) == (
        "train",
        ("a", "b", "c"),
        "dp=6",
        "10.0.0.1",
        4000,
    )


def test_nothing_starts_before_ranks_have_where_to_meet_or_with_too_few_nodes() -> None:
    story = Story()
    story.coordinator.meet_at("", 0)
    story.arrive("a", "b", "c", "d")
    assert story.passes(5).task == "wait"
    story = Story()
    story.arrive("a")
    assert story.passes(500).task == "wait"
    order = story.passes(110)
    assert (order.task, order.status) == ("end", 1)
    assert order.reason == "1 of 2 nodes were there after 600 s; start the others"


def test_a_silent_node_is_lost_and_the_others_go_on_when_their_ranks_have_ended() -> None:
    story = training("a", "b", "c", "d")
    first = story.coordinator.order.number
    story.silent = {"b"}
    assert story.passes(9).number == first, "nine seconds of silence are within ten"
    assert story.passes(3).task in ("wait", "train")
    order = story.passes(2)
    assert (order.task, order.members, order.layout) == ("train", ("a", "c", "d"), "dp=6")
    assert story.failures == [("node", "b", "node b is lost: nothing was heard of it for 10 s", "dp=8")]
    story.silent = {"b", "c"}
    assert story.passes(20).members == ("a", "d")


def test_a_broken_connection_counts_sooner_unless_it_is_made_again() -> None:
    story = training("a", "b", "c")
    story.coordinator.leave("c", story.now)
    assert story.passes(5).members == ("a", "b", "c"), "it came back"
    story.silent = {"c"}
    story.coordinator.leave("c", story.now)
    story.states["a"] = "failed"  # its ranks miss the other node's
    story.passes(2)
    story.states["a"] = ""
    assert story.passes(5).members == ("a", "b")
    assert story.failures[0][:3] == ("node", "c", "node c is lost: its supervisor ended")


def test_a_failed_rank_starts_all_again_in_the_same_order() -> None:
    story = training("a", "b", "c", "d")
    number = story.coordinator.order.number
    story.states["c"] = "failed"
    story.passes(1)
    story.states["c"] = ""
    order = story.passes(3)
    assert (order.task, order.members) == ("train", ("a", "b", "c", "d")) and order.number > number
    assert story.failures == [("rank", "c", "why", "dp=8")]


def test_nobody_is_started_while_an_old_rank_may_live() -> None:
    story = training("a", "b", "c", "d")
    story.states["a"] = "failed"
    story.states["d"] = "training"
    story.passes(1)
    story.states["a"] = ""
    assert story.passes(18).task == "wait"
    story.states["d"] = ""
    assert story.passes(2).task == "train"


def test_a_node_whose_ranks_cannot_be_ended_is_not_waited_for_for_ever() -> None:
    story = training("a", "b", "c", "d")
    story.states["b"] = "failed"
    story.states["d"] = "training"
    story.passes(1)
    story.states["b"] = ""
    order = story.passes(25)  # more than twice what a silent node is waited for
    assert (order.task, order.members) == ("train", ("a", "b", "c"))
    story.checkpoint += 1
    assert story.passes(5).members == ("a", "b", "c"), "it is no node to grow by"
    story.states["d"] = ""
    story.passes(2)
    story.checkpoint += 1
    assert story.passes(5).members == ("a", "b", "c", "d")
    story.states["b"], story.states["a"] = "failed", "training"
    story.passes(1)
    story.states["b"] = ""
    assert story.passes(200).task == "wait", "the leader's own node had rank 0"


def test_who_comes_late_is_waited_for_until_it_has_heard_the_order() -> None:
    """However long the job has waited: it has no ranks that must be ended."""
    story = Story(least=1, most=2)
    story.arrive("a")
    assert story.passes(40).task == "wait", "more nodes are expected"
    story.coordinator.hear("b", Status(), story.now)
    assert story.coordinator.decide(story.now).task == "wait", "it has not answered yet"
    story.arrive("b")
    assert story.passes(2).members == ("a", "b")


def test_what_a_failing_folder_interrupts_is_decided_at_the_next_look() -> None:
    story = training("a", "b", "c", least=1)
    fails = [True]

    def newest(*failure: str) -> str:
        if fails:
            raise OSError(fails.pop(), "Stale file handle")
        return ""

    story.coordinator._judge = newest
    story.states.pop("b")
    story.now += 20
    for node in ("a", "c"):
        story.coordinator.hear(node, Status(story.coordinator.order.number, "training"), story.now)
    with pytest.raises(OSError, match="Stale"):
        story.coordinator.decide(story.now)
    order = story.coordinator.decide(story.now + 0.25)
    assert (order.task, order.reason) == (
        "wait",
        "node b is lost: nothing was heard of it for 10 s; starting again",
    )


def test_giving_up_refusing_and_finishing_are_the_same_for_all() -> None:
    story = training("a", "b")
    story.verdict = "enough"
    story.states["b"] = "failed"
    order = story.passes(2)
    assert (order.task, order.status, order.reason) == ("end", 1, "enough")
    for states, status in ((("refused", ""), 2), (("done", "done"), 0), (("preempted", "preempted"), 75)):
        story = training("a", "b")
        story.states |= dict(zip("ab", states, strict=True))
        order = story.passes(2)
        assert (order.task, order.status) == ("end", status)
    story = training("a", "b")
    story.states["a"] = "done"
    assert story.passes(5).task == "train", "the other one is still at it"


def test_a_returned_node_is_taken_in_after_the_next_checkpoint_and_comes_last() -> None:
    story = training("a", "b", "c", "d")
    story.silent = {"b"}
    story.passes(15)
    story.silent.clear()
    assert story.passes(100).members == ("a", "c", "d"), "growing now would throw work away"
    story.checkpoint = 12
    assert story.passes(3).members == ("a", "c", "d", "b")
    assert [failure[0] for failure in story.failures] == ["node"], "growing is no failure"


def test_more_nodes_than_wanted_are_spares_that_step_in() -> None:
    story = training("a", "b", "c", most=2)
    assert story.coordinator.order.members == ("a", "b")
    story.checkpoint = 5
    assert story.passes(30).members == ("a", "b"), "a spare changes nothing"
    story.silent = {"b"}
    assert story.passes(15).members == ("a", "c")
    story.silent = {"a", "b"}
    assert story.passes(100).members == ("a", "c"), "who leads is never lost: it must live"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["silent", "back", "failed", "save"])), max_size=25)
)
def test_whatever_happens_the_job_goes_on_with_those_that_are_there(events: list[tuple[str, str]]) -> None:
    story = training(*"abcde", least=1, most=5)
    numbers = [story.coordinator.order.number]
    for node, event in events:
        if event == "silent":
            story.silent.add(node)
        elif event == "back":
            story.silent.discard(node)
        elif event == "failed":
            story.states[node] = "failed"
            story.passes(1)
            story.states[node] = ""
        else:
            story.checkpoint += 1
        numbers.append(story.passes(4).number)
    assert numbers == sorted(numbers), "an order is never taken back"
    story.silent.discard("a")  # in whose name all is decided
    story.passes(20)
    story.checkpoint += 1
    story.passes(5)
    story.checkpoint += 1
    order = story.passes(5)
    assert order.task == "train" and set(order.members) == set("abcde") - story.silent


def test_nobody_trains_while_the_disk_of_the_run_is_full() -> None:
    story = training("a", "b")
    story.room = False
    story.states["b"] = "failed"
    assert story.passes(1).task == "wait"
    story.states["b"] = ""
    assert story.passes(300).task == "wait" and len(story.failures) == 1, "no attempt was lost in vain"
    story.room = True
    assert story.passes(2).task == "train"


def test_nodes_that_cannot_hold_the_run_wait_for_others() -> None:
    story = training("a", "b", "c")
    story.fewest, story.silent = 3, {"c"}
    order = story.passes(30)
    assert (order.task, order.reason) == ("wait", "2 nodes cannot hold it; waiting for others")
    assert story.passes(400).number == order.number, "it is said once"
    story.silent.clear()
    assert story.passes(5).members == ("a", "b", "c")
    story.silent = {"c"}
    order = story.passes(700)
    assert (order.task, order.status) == ("end", 1)
    assert order.reason == "2 nodes cannot hold it; no others came in 600 s"


def test_nodes_are_heard_while_it_is_planned_for_them() -> None:
    story = training("a", "b", "c")
    story.plans, story.silent = False, {"c"}
    assert story.passes(100).task == "wait" and len(story.failures) == 1
    story.silent = {"b", "c"}  # while it is planned for a and b
    story.passes(20)
    story.silent, story.plans = {"b"}, True
    assert story.passes(3).members == ("a", "c")


def slow_story() -> Story:
    """Two nodes; the second is slow where parts are equal."""
    story = Story(2, 2, 1)

    def balanced(order: Order, paces: Mapping[str, Pace]) -> Balance | None:
        if order.layout == "dp=2" and paces["b"].own > 1:
            return Balance(Layout.parse("dp=2,batch_weights=2:1"), 2.0, 1.4, "b", 2.0)
        return None

    story.coordinator._balance = balanced
    story.arrive("a", "b")
    assert story.passes(2).layout == "dp=2"
    return story


def windows(story: Story, *own: float) -> Order:
    """The second node's seconds in one window after another."""
    for number, seconds in enumerate(own):
        order = story.coordinator.order
        for node in ("a", "b"):
            pace = Pace(10 * (number + 1), seconds if node == "b" else 1.0, 2.0, 1.0)
            story.now += 1
            story.coordinator.hear(node, Status(order.number, "training", pace=pace), story.now)
            story.coordinator.decide(story.now)
    return story.coordinator.order


def test_a_slow_node_gets_less_right_after_a_checkpoint() -> None:
    story = slow_story()
    assert windows(story, 2.0, 2.0).task == "train", "there is nothing newer to continue from"
    story.checkpoint = 5
    assert windows(story, 2.0, 2.0).task == "wait"
    order = story.passes(3)
    assert order.layout == "dp=2,tp=1,pp=1,batch_weights=2:1"
    assert order.reason.endswith(
        "node b is 2 times as slow as the fastest: batch_weights=2:1 makes a step 1.4 s, not 2 s"
    )
    story.checkpoint = 6
    assert story.passes(30).number == order.number, "it stays"


def test_a_moment_of_slowness_changes_nothing_and_a_failure_ends_it() -> None:
    story = slow_story()
    windows(story, 2.0, 0.9, 2.0)
    story.checkpoint = 5
    assert story.passes(3).layout == "dp=2"
    story = slow_story()
    windows(story, 2.0, 2.0)
    story.checkpoint = 5
    assert story.passes(5).layout == "dp=2,tp=1,pp=1,batch_weights=2:1"
    story.states["b"] = "failed"
    story.passes(1)
    story.states["b"] = ""
    assert story.passes(3).layout == "dp=2"


def test_a_layout_that_needs_too_much_memory_is_given_up_for_good() -> None:
    """The user did not ask for it, so it is none of his to mend."""
    story = slow_story()
    windows(story, 2.0, 2.0)
    story.checkpoint = 5
    assert story.passes(5).layout == "dp=2,tp=1,pp=1,batch_weights=2:1"
    story.states["b"] = "refused"
    story.passes(1)
    story.states["b"] = ""
    assert story.passes(3).layout == "dp=2"
    windows(story, 2.0, 2.0)
    story.checkpoint = 10
    assert windows(story, 2.0, 2.0).task == "train" and story.passes(5).layout == "dp=2"
