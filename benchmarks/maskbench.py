"""Make the MaskBench file that the figures name from a clone of github.com/guidance-ai/jsonschemabench.

    python benchmarks/maskbench.py PATH/TO/jsonschemabench maskbench-dev.jsonl.gz

Takes 3,073 of the 11,306 schemas (at commit ba103c7), the 27 % that the SHA-1 of their names picks; `--share 100` takes all.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path


def picked(name: str, share: int) -> bool:
    """Whether a schema is among the `share` per cent that its name decides."""
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % 100 < share


def line(file: Path) -> str:
    """One JSON line `{name, schema, tests: [{valid, data}]}`, as `deepinfer schema score` reads them."""
    case = json.loads(file.read_bytes())
    tests = [{"valid": test["valid"], "data": test["data"]} for test in case["tests"]]
    return json.dumps({"name": file.stem, "schema": case["schema"], "tests": tests})


def main() -> None:
    """Read the clone, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--share", type=int, default=27, help="per cent of the schemas")
    asked = parser.parse_args()
    files = sorted((asked.clone / "maskbench/data").glob("*.json"))
    if not files:
        parser.error(f"{asked.clone} has no maskbench/data/*.json: give a clone of guidance-ai/jsonschemabench")
    lines = [line(file) for file in files if picked(file.stem, asked.share)]
    with gzip.open(asked.output, "wt", encoding="utf-8") as out:
        out.writelines(f"{text}\n" for text in lines)
    print(f"{asked.output}: {len(lines)} of {len(files)} schemas")


if __name__ == "__main__":
    main()
