"""Run by `torchrun` from test_trainer.py: train, then let every process write down its own weights.

two_processes.py DIRECTORY ARGUMENTS_OF_TRAIN_PEFT...
"""

import sys

import torch
from domino_spec.train_peft import train

trainer = train(sys.argv[2:])
torch.save(trainer.objective.drafter.state_dict(), f"{sys.argv[1]}/rank{trainer.args.process_index}.pt")
if torch.distributed.is_initialized():
    sys.exit("train() left its process group open; what is left to the interpreter's exit may abort it.")
