"""The client app. It runs on every node and trains on the node's examples, which never leave the node."""

from flwr.app import Context

from app.task import OBJECTIVE, load_examples
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.deployment.flower import make_client_app
from fedsieve.runtime.loop import LoopEngine


def client_engine_for(context: Context) -> LoopEngine:
    """Return the engine that trains on this node's examples."""
    client, num_clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return deployment_config(context.run_config, OBJECTIVE).client_engine(client, *load_examples(client, num_clients))


app = make_client_app(client_engine_for)
