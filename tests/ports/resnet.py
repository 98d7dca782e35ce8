"""A residual network on handwritten digits, written for ColossalAI's API; only imports and devices are changed.

Run: booster run --nproc-per-node 2 tests/ports/resnet.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset
from tqdm import tqdm

import booster as colossalai
from booster import Booster, DistCoordinator, get_accelerator
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin

LEARNING_RATE = 1e-3


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


def build_model(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        BasicBlock(16, 16),
        BasicBlock(16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


def build_dataloader(args, coordinator, plugin):
    with coordinator.priority_execution():
        digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set = TensorDataset(images[: args.num_samples], labels[: args.num_samples])
    test_set = TensorDataset(images[-100:], labels[-100:])
    train_dataloader = plugin.prepare_dataloader(
        train_set, batch_size=args.batch_size, shuffle=True, drop_last=True, pin_memory=True, num_workers=0
    )
    test_dataloader = plugin.prepare_dataloader(test_set, batch_size=args.batch_size)
    return train_dataloader, test_dataloader


def reduce_mean(tensor):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


@torch.no_grad()
def evaluate(model, test_dataloader, coordinator):
    model.eval()
    correct = torch.zeros(1, dtype=torch.int64, device=get_accelerator().get_current_device())
    total = torch.zeros(1, dtype=torch.int64, device=get_accelerator().get_current_device())
    for images, labels in test_dataloader:
        images = images.to(get_accelerator().get_current_device())
        labels = labels.to(get_accelerator().get_current_device())
        predicted = model(images).argmax(dim=1)
        total += labels.size(0)
        correct += (predicted == labels).sum().item()
    dist.all_reduce(correct)
    dist.all_reduce(total)
    accuracy = correct.item() / total.item()
    if coordinator.is_master():
        print(f"accuracy {accuracy:.4f}")


def train_epoch(epoch, args, model, optimizer, criterion, train_dataloader, booster, coordinator):
    model.train()
    train_dataloader.sampler.set_epoch(epoch)
    with tqdm(train_dataloader, desc=f"Epoch [{epoch + 1}/{args.epochs}]", disable=not coordinator.is_master()) as pbar:
        for images, labels in pbar:
            images = images.to(get_accelerator().get_current_device())
            labels = labels.to(get_accelerator().get_current_device())
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            loss = reduce_mean(loss)
            pbar.set_postfix({"loss": loss.item()})
            coordinator.print_on_master(f"epoch {epoch} loss {loss.item():.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="torch_ddp, torch_ddp_fp16, low_level_zero, gemini")
    parser.add_argument("-r", "--resume", type=int, default=-1, help="epoch to resume from")
    parser.add_argument("-c", "--checkpoint", default="./checkpoint", help="checkpoint directory")
    parser.add_argument("-i", "--interval", type=int, default=1, help="epochs between checkpoints")
    parser.add_argument("-e", "--epochs", type=int, default=2)
    parser.add_argument("-b", "--batch_size", type=int, default=32)
    parser.add_argument("-n", "--num_samples", type=int, default=256)
    args = parser.parse_args()

    if args.interval > 0:
        os.makedirs(args.checkpoint, exist_ok=True)

    colossalai.launch_from_torch(seed=1024)
    coordinator = DistCoordinator()

    booster_kwargs = {}
    if args.plugin == "torch_ddp_fp16":
        booster_kwargs["mixed_precision"] = "fp16"
    if args.plugin.startswith("torch_ddp"):
        plugin = TorchDDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(initial_scale=2**5)
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5)
    booster = Booster(plugin=plugin, **booster_kwargs)

    train_dataloader, test_dataloader = build_dataloader(args, coordinator, plugin)
    model = build_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=LEARNING_RATE)
    lr_scheduler = MultiStepLR(optimizer, milestones=[1, 2, 3], gamma=1 / 3)
    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )

    if args.resume >= 0:
        booster.load_model(model, f"{args.checkpoint}/model_{args.resume}.pth")
        booster.load_optimizer(optimizer, f"{args.checkpoint}/optimizer_{args.resume}.pth")
        booster.load_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler_{args.resume}.pth")

    start_epoch = args.resume if args.resume >= 0 else 0
    for epoch in range(start_epoch, args.epochs):
        train_epoch(epoch, args, model, optimizer, criterion, train_dataloader, booster, coordinator)
        lr_scheduler.step()
        if args.interval > 0 and (epoch + 1) % args.interval == 0:
            booster.save_model(model, f"{args.checkpoint}/model_{epoch + 1}.pth")
            booster.save_optimizer(optimizer, f"{args.checkpoint}/optimizer_{epoch + 1}.pth")
            booster.save_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler_{epoch + 1}.pth")

    evaluate(model, test_dataloader, coordinator)


if __name__ == "__main__":
    main()
