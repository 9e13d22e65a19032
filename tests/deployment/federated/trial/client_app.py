"""A client that serves several algorithms, and misbehaves in the rounds that the test names."""

import json

from fedsieve.deployment.flower import make_client_app
from trial.faults import FaultyEngine
from trial.task import deployments, load_examples


class EngineByFingerprint:
    """One engine per algorithm; the fingerprint in a packet names the engine."""

    def __init__(self, engines):
        self.engines = engines
        self.data = next(iter(engines.values())).data

    def run_client(self, clock, message, client, memory=None):
        return self.engines[int.from_bytes(message[4:8], "little")].run_client(clock, message, client, memory)


def client_engine_for(context):
    client = context.node_config["partition-id"]
    faults = json.loads(context.run_config["test.faults"])
    examples = load_examples(client)
    return EngineByFingerprint(
        {
            deployment.fingerprint: FaultyEngine(deployment.client_engine(client, *examples), faults.get(name, {}))
            for name, deployment in deployments(context.run_config)
        }
    )


app = make_client_app(client_engine_for)
