"""Sites that may die and return: torchft says who is there, tagc exchanges what they learned.

python examples/recipes/elastic_sites.py --sites 3 --steps 256

starts torchft's lighthouse and the sites, and starts a site that dies again: kill one and see. On
several machines start the lighthouse on one of them (`torchft_lighthouse --min_replicas 2`), and in
every site, with TORCHFT_LIGHTHOUSE=http://that-machine:29510:

torchrun --nproc-per-node 1 --max-restarts 9 examples/recipes/elastic_sites.py

If a site has several devices, shard its model by fully_shard: every rank makes its Manager.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft  # pyright: ignore
from task import Reverser, batch, loss_of
from torchft.coordination import LighthouseServer  # pyright: ignore

import tagc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, help="start the lighthouse and so many sites here")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--policy", default="sites")
    args = parser.parse_args()
    if args.sites:
        start(args.sites, ["--steps", str(args.steps), "--policy", args.policy])
    else:
        train(args.steps, args.policy)


def train(steps: int, policy: str) -> None:
    """Train as one site."""
    dist.init_process_group("gloo")  # the ranks of this site
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        # What a site that joins gets besides. Each rank sends its own shards, by no collective.
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=load,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=120),  # longer than the steps between two exchanges
        quorum_retries=100,  # how often to ask a lighthouse that does not answer
        max_retries=10,
    )
    sites = tagc.sites(model, optimizer, policy, sites=manager)
    data = os.getpid()  # every site has its own
    # A site that joined counts the steps of the others.
    while (step := sites.metrics().steps) < steps:
        tokens = batch(step, data)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()  # and, when it is due, an exchange with the sites that are there
        optimizer.zero_grad()
        if step % 16 == 0:
            print(
                f"process {os.getpid()}, step {step}, loss {loss.item():.6f}, {sites.sites} sites"
            )
    print(sites.metrics())
    manager.shutdown()
    dist.destroy_process_group()


def start(sites: int, options: list[str]) -> None:
    """Start the lighthouse and the sites, and those that die again."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=10_000,  # how long the sites wait for one that lives but does not come
        heartbeat_timeout_ms=3_000,  # and for one that is silent
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["1", __file__, *options]
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    running = [subprocess.Popen(command) for _ in range(sites)]
    while running:
        time.sleep(0.5)
        for i, site in enumerate(running):
            if site.poll() not in (None, 0):
                print("a site died: start it again")
                running[i] = subprocess.Popen(command)
        running = [site for site in running if site.poll() != 0]
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
