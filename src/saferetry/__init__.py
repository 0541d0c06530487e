"""A drop-in for PyMongo that makes trying again safe: the same write is sent again, or it is refused."""

import logging

from saferetry import errors
from saferetry._budget import Budget
from saferetry._call import CallReport
from saferetry._collections import AsyncMongoClient, MongoClient, wrap
from saferetry._gridfs import prepare_gridfs
from saferetry._handler import handler
from saferetry._handling import Failure
from saferetry._identity import RecordKey
from saferetry._outcomes import Outcome, WriteView
from saferetry._record import Record, current_record, propagate, record, repeatable
from saferetry._settings import Settings

__all__ = [
    "AsyncMongoClient",
    "Budget",
    "CallReport",
    "Failure",
    "MongoClient",
    "Outcome",
    "Record",
    "RecordKey",
    "Settings",
    "WriteView",
    "current_record",
    "errors",
    "handler",
    "prepare_gridfs",
    "propagate",
    "record",
    "repeatable",
    "wrap",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
