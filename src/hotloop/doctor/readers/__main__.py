"""One reader, printed."""

import importlib
import json
import sys

from hotloop.doctor.readers import ANSWER

if __name__ == "__main__":
    module = importlib.import_module(f"hotloop.doctor.readers.{sys.argv[1]}")
    sys.stdout.write(f"\n{ANSWER}{json.dumps(module.read(*sys.argv[2:]))}\n")
