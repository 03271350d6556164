"""What requests are answered with, as the application's state has it. For routes: `Depends(models_of)`."""

from starlette.requests import HTTPConnection

from ...storage.ledger.ledger import Ledger
from ..client.client import Client
from ..settings import Settings
from .live_answers import LiveAnswers
from .models import ServedModels


def answers_of(connection: HTTPConnection) -> LiveAnswers:
    answers: LiveAnswers = connection.app.state.live
    return answers


def models_of(connection: HTTPConnection) -> ServedModels:
    models: ServedModels = connection.app.state.service.models
    return models


def client_of(connection: HTTPConnection) -> Client:
    client: Client = connection.app.state.service.client
    return client


def ledger_of(connection: HTTPConnection) -> Ledger:
    return client_of(connection).ledger


def settings_of(connection: HTTPConnection) -> Settings:
    return client_of(connection).settings
