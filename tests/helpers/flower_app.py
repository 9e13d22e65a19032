"""Run a Flower app in this process: a grid whose nodes are client apps with their own contexts."""

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def task_identity(monkeypatch):
    """Flower's messages belong to a task of a run; outside Flower's runtime the test sets it."""
    for name, value in (("task_id", 1), ("run_id", 1), ("node_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}", value)


class ProcessGrid(Grid):
    """A grid of `num_nodes` nodes that run a client app; an exception in the app is an error reply, as in Flower."""

    def __init__(self, app, num_nodes, run_config=None, change_reply=lambda node, reply: reply):
        self.app, self.change_reply = app, change_reply
        self.contexts = {
            100 + i: Context(
                run_id=1,
                node_id=100 + i,
                node_config={"partition-id": i, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_nodes)
        }
        self.sent = []

    set_run = run = create_message = push_messages = pull_messages = None

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        return [reply for message in messages if (reply := self._exchange(message)) is not None]

    def _exchange(self, message):
        self.sent.append(message)
        node = message.metadata.dst_node_id
        arrived = Message(copy_records(message.content), metadata=message.metadata)
        try:
            reply = self.app(arrived, self.contexts[node])
        except Exception as error:
            reply = Message(Error(0, str(error)), reply_to=message)
        return self.change_reply(node, reply)


def copy_records(content):
    """A copy that shares no configuration with the server's message."""
    return RecordDict({key: ConfigRecord(dict(value)) if isinstance(value, ConfigRecord) else value for key, value in content.items()})
