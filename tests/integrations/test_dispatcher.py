"""Messages that cannot be sent, whatever is asked for in their place."""

from types import SimpleNamespace

import pytest

from manifoldagg.integrations.flower import dispatcher
from manifoldagg.integrations.flower.reporting import RunReport


def flower_message(node, name):
    return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, message_id=name, ttl=5.0))


@pytest.mark.usefixtures("as_shipped")
def test_replacement_node_receives_the_pending_task_first(monkeypatch):
    """Node 1 cannot be reached, so node 2 is asked, which has a model to evaluate on its way: its task waits."""
    monkeypatch.setattr(dispatcher, "_with_fresh_ttl", lambda message: message)
    tickets = iter(["to 1", "to 2"])
    out = []

    def dispatch(node):
        out.append(next(tickets))
        return out[-1], {}

    server = SimpleNamespace(drop=out.remove)
    grid = SimpleNamespace(get_node_ids=lambda: [1, 2], push_messages=lambda _: ["evaluation"])
    sampler = SimpleNamespace(start=lambda present: [1], on_completion=lambda node, well, present: [2])
    sending = dispatcher.MessageDispatcher(
        grid,
        server,
        RunReport(),
        dispatch=dispatch,
        bound_evaluation=lambda content: content,
        largest_reply_bytes=1,
        poll_interval=0.0,
        accepts_node=lambda node: True,
    )
    sending.open(lambda here: sampler)
    nodes = sending.nodes
    # It has evaluated last: now a task would come first, if there were one.
    nodes.enqueue(2, "earlier", priority=True)
    nodes.mark_sent(2, "earlier", "earlier", deadline=1e9)
    nodes.complete("earlier", now=0.0, succeeded=True)
    evaluation = dispatcher.EvaluationRound(1, deadline=1e9)
    sending.start_evaluation(evaluation, [flower_message(2, "evaluation")])
    sending.send(lambda: [flower_message(1, "task")])
    assert nodes.outstanding == ["evaluation"]
    assert out == ["to 2"]
    assert [getattr(work, "id", "evaluation") for work in nodes.pending_work(2)] == ["evaluation", "to 2"]
