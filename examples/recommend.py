"""Train a recommender on a file of histories, as a Bayesian filter, and ask it what comes next."""

import argparse
import random

from transformers import AutoModel

import bft_hf.rec  # noqa: F401 - makes the recommenders known to AutoModel
from bft_hf.recipes.rec import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", help="lines of `user item item ...`, oldest first; or any file that bft-rec reads")
parser.add_argument("--history", nargs="+", default=["album-7", "album-8", "album-9"], help="items of one user")
arguments = parser.parse_args()

if arguments.data is None:  # people who hear most albums of a shelf in order
    arguments.data = "listeners.txt"
    with open(arguments.data, "w") as file:
        for user in range(300):
            first = random.randrange(40)
            albums = [f"album-{first + step}" for step in range(10) if random.random() < 0.9]
            file.write(f"listener-{user} {' '.join(albums)}\n")

flags = "--method bft --hidden_size 16 --max_length 10 --epochs 8 --learning_rate 1e-2 --output_dir recommender"
assert main(["--data", arguments.data, *flags.split(), "--overwrite"]) == 0

model = AutoModel.from_pretrained("recommender")
for row in model.recommend([arguments.history], k=3)[0]:
    print(
        f"{row.item}: {row.probability:.0%}, score {row.score:.2f} ± {row.score_std:.2f}, precision {row.precision:.2f}"
    )
