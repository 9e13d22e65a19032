"""The server: leads the rounds and keeps what comes of them in `run-dir`."""

from flwr.app import Context

from app.task import OBJECTIVE, measure
from fedsieve.deployment.config import deployment_config
from fedsieve.deployment.flower import make_server_app
from fedsieve.deployment.plan import DeploymentConfig
from fedsieve.deployment.server import run_server


def deployment_for(context: Context) -> DeploymentConfig:
    """What is agreed on, and what the server measures after every round."""
    return deployment_config(context.run_config, OBJECTIVE, measure)


app = make_server_app(deployment_for, run_server)
