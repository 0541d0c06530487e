"""The lab behind `saferetry lab`: a mongod of its own, faults, and what they do to raw PyMongo and to saferetry."""
