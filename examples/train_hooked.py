"""Train a small network on scikit-learn's digits: torchrun --nproc-per-node 2 THIS_FILE."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

from ddltool import runtime


def main() -> None:
    """Train for three epochs and print the accuracy on samples that were held out."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, targets = load_digits(return_X_y=True)
    features, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    dataset = data.TensorDataset(features[:1500], labels[:1500])
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)
    loader = hook.dataloader(batch_size=16, shuffle=True, seed=0)
    for epoch in range(3):
        hook.set_epoch(epoch)
        for inputs, answers in loader:
            optimizer.zero_grad()
            hook.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
