"""The server: leads the rounds and keeps what comes of them in `run-dir`."""

from flwr.app import Context

from app.task import OBJECTIVE, measure
from fedsieve.deployment.config import plan_from
from fedsieve.deployment.flower import make_server_app
from fedsieve.deployment.plan import Plan
from fedsieve.deployment.server import lead


def plan_for(context: Context) -> Plan:
    """What is agreed on, and what the server measures after every round."""
    return plan_from(context.run_config, OBJECTIVE, measure)


app = make_server_app(plan_for, lead)
