"""The command line: exit code 2, and one line that says why."""

from __future__ import annotations

from faults.mistakes.wrong_call import WrongCall

from booster.cli import main

WORLD_SIZE = 1

_LINES = [
    "run",
    "run --nproc-per-node 0 train.py",
    "run --nproc-per-node two train.py",
    "run --nnodes 2:1 train.py",
    "run --nnodes 0 train.py",
    "run --nnodes 2 train.py",
    "run --node-rank 1 train.py",
    "run --node-rank 2 --nnodes 2 --master-addr a train.py",
    "run --master-port 70000 train.py",
    "run --max-restarts -1 train.py",
    "run --max-restarts some train.py",
    "run --extra-launch-args rdzv train.py",
    "run --extra-launch-args port=1 train.py",
    "run --hostfile no-such-file train.py",
    "run --host , train.py",
    "run --include node-1 train.py",
    "run --host node-1,node-2 --exclude node-3 train.py",
    "run --host node-1,node-2 --exclude node-1,node-2 train.py",
    "run --host node-1 --node-rank 1 train.py",
    "run --ssh-port 22 train.py",
    "run --host node-1 --ssh-port 0 train.py",
    "run no-such-script.py",
    "run --nprocs 2 train.py",
    "check --comm-timeout 0 --comm",
    "check --everything",
    "benchmark -g 0",
    "benchmark -g 2 -m 4d",
    "benchmark -g 2 -b 0",
    "benchmark -g 2 --timeout 0",
    "benchmark -g 2 --plot out.xyz",
    "estimate",
    "estimate --model llama-8t",
    "estimate --model llama-7b --nproc 0",
    "estimate --model llama-7b --plugin ddp",
    "estimate --model llama-7b --plugin low_level_zero --settings stage",
    "estimate --model llama-7b --plugin low_level_zero --settings stages=1",
    "estimate --model llama-7b --plugin low_level_zero,gemini --settings stage=1",
    "estimate --model llama-7b --device-memory 80XB",
    "estimate --model llama-7b --optimizer Adam2",
    "estimate --model llama-7b --seq 0",
    "estimate --model gpt2-xl --seq 9999",
    "estimate --model llama-7b --mixed-precision fp17",
    "estimate --model no-such.json",
    "estimate --model gpt2 --plugin torch_ddp --nproc 2 --profile no-such-profile.json",
    "plan --model llama-7b --device h1000",
    "plan --model llama-7b --device h100 --interconnect warp",
    "plan --model llama-7b --ranks-per-host 4",
    "plan --model llama-7b --device h100 --output no-such-directory/plan.json",
    "profile-mesh --nproc 0",
    "ckpt",
    "ckpt inspect no-such-checkpoint",
    "ckpt inspect .",
    "ckpt verify no-such-checkpoint",
    "ckpt convert no-such-checkpoint out",
    "ckpt consolidate no-such-checkpoint out.safetensors",
    "ckpt diff no-such-checkpoint other",
    "ckpt export-optimizer no-such-checkpoint out.pt",
    "plot no-such-log -o out.png",
    "plot",
    "train",
]


def _command(line: str) -> WrongCall:
    return WrongCall(name=f"booster {line}", prepare=lambda _: lambda: main(line.split()))


def wrong_calls() -> list[WrongCall]:
    """Returns the wrong calls of this topic."""
    return [_command(line) for line in _LINES]
