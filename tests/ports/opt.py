"""OPT on 4 ranks, tensor by pipeline parallel, lazily built; for ColossalAI's API, with other imports and devices.

Run: booster run --nproc-per-node 4 tests/ports/opt.py
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import OPTConfig, OPTForCausalLM, get_cosine_schedule_with_warmup

import booster as colossalai
from booster import (
    Booster,
    DistCoordinator,
    LazyInitContext,
    disable_existing_loggers,
    get_accelerator,
    get_dist_logger,
)
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin

output_transform_fn = lambda x: x
criterion = lambda x: x.loss


class CountingDataset(Dataset):
    """Sequences that count up in steps of 1 to 5, padded at their ends."""

    def __init__(self, num_samples, max_length=16, vocab_size=64):
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(3, vocab_size, (num_samples, 1), generator=generator)
        step = torch.randint(1, 6, (num_samples, 1), generator=generator)
        length = torch.randint(max_length // 2, max_length + 1, (num_samples, 1), generator=generator)
        position = torch.arange(max_length)
        self.attention_mask = (position < length).long()
        self.input_ids = torch.where(position < length, 3 + (start + step * position) % (vocab_size - 3), 1)

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "attention_mask": self.attention_mask[index]}


def collate(batch):
    batch = {key: torch.stack([data[key] for data in batch]) for key in batch[0]}
    batch["labels"] = batch["input_ids"].clone()
    return batch


def move_to_cuda(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, dataloader, booster, coordinator):
    get_accelerator().synchronize()

    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    is_pp_last_stage = use_pipeline and booster.plugin.stage_manager.is_last_stage()
    print_flag = is_pp_last_stage and coordinator.is_last_process() if use_pipeline else coordinator.is_master()
    total_step = len(dataloader)

    model.train()
    optimizer.zero_grad()
    dataloader.sampler.set_epoch(epoch)
    dataloader = iter(dataloader)
    with tqdm(range(total_step), desc=f"Epoch [{epoch + 1}]", disable=not print_flag) as pbar:
        for _ in pbar:
            if use_pipeline:
                outputs = booster.execute_pipeline(dataloader, model, _criterion, optimizer, return_loss=True)
                loss = outputs["loss"] if is_pp_last_stage else None
            else:
                data = next(dataloader)
                data = move_to_cuda(data, get_accelerator().get_current_device())
                outputs = model(**data)
                loss = _criterion(outputs, None)
                booster.backward(loss, optimizer)
            if loss is not None:
                loss = loss.detach().clone()
                dist.all_reduce(loss, group=booster.plugin.dp_group)
                loss.div_(booster.plugin.dp_size)
            if print_flag:
                pbar.set_postfix({"loss": loss.item()})
                print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)

            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()


def parse_demo_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output_path", type=str, default="./output_model.bin")
    parser.add_argument("-p", "--plugin", type=str, default="hybrid_parallel")
    parser.add_argument("-e", "--num_epoch", type=int, default=2)
    parser.add_argument("-b", "--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--warmup_ratio", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--mixed_precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--resume", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_demo_args()

    colossalai.launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    world_size = coordinator.world_size

    disable_existing_loggers()
    logger = get_dist_logger()
    if coordinator.is_master():
        transformers.utils.logging.set_verbosity_info()
    else:
        transformers.utils.logging.set_verbosity_error()

    booster_kwargs = {}
    if args.plugin == "torch_ddp_fp16":
        booster_kwargs["mixed_precision"] = "fp16"
    if args.plugin.startswith("torch_ddp"):
        plugin = TorchDDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(
            precision=args.mixed_precision, offload_optim_frac=1.0, pin_memory=True, initial_scale=2**5
        )
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(precision=args.mixed_precision, initial_scale=2**5)
    elif args.plugin == "hybrid_parallel":
        plugin = HybridParallelPlugin(
            tp_size=2,
            pp_size=2,
            num_microbatches=2,
            enable_all_optimization=True,
            zero_stage=0,
            precision=args.mixed_precision,
            initial_scale=1,
        )
    logger.info(f"Set plugin as {args.plugin}", ranks=[0])

    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        dropout=0.0,
        attention_dropout=0.0,
    )
    init_ctx = (
        LazyInitContext(default_device=get_accelerator().get_current_device())
        if isinstance(plugin, (GeminiPlugin, HybridParallelPlugin))
        else nullcontext()
    )
    with init_ctx:
        model = OPTForCausalLM(config)
    logger.info("Finish building the model", ranks=[0])

    model.gradient_checkpointing_enable()

    dataset = CountingDataset(num_samples=48)
    dataloader = plugin.prepare_dataloader(
        dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=collate
    )

    optimizer = HybridAdam(model.parameters(), lr=(args.learning_rate * world_size), weight_decay=args.weight_decay)

    total_steps = len(dataloader) * args.num_epoch
    num_warmup_steps = int(args.warmup_ratio * total_steps)
    lr_scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=len(dataloader) * args.num_epoch
    )

    def _criterion(outputs, inputs):
        outputs = output_transform_fn(outputs)
        loss = criterion(outputs)
        return loss

    booster = Booster(plugin=plugin, **booster_kwargs)
    model, optimizer, _criterion, dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optimizer, dataloader=dataloader, criterion=_criterion, lr_scheduler=lr_scheduler
    )

    if args.resume > 0:
        booster.load_model(model, f"{args.output_path}/{args.resume}/model")
        booster.load_optimizer(optimizer, f"{args.output_path}/{args.resume}/optimizer")
        booster.load_lr_scheduler(lr_scheduler, f"{args.output_path}/{args.resume}/lr_scheduler")

    logger.info("Start finetuning", ranks=[0])
    for epoch in range(args.resume, args.num_epoch):
        train_epoch(epoch, model, optimizer, _criterion, lr_scheduler, dataloader, booster, coordinator)
        booster.save_model(model, f"{args.output_path}/{epoch + 1}/model", shard=True)
        booster.save_optimizer(optimizer, f"{args.output_path}/{epoch + 1}/optimizer", shard=True)
        booster.save_lr_scheduler(lr_scheduler, f"{args.output_path}/{epoch + 1}/lr_scheduler")
        logger.info(f"Saving checkpoint of epoch {epoch + 1} to {args.output_path}", ranks=[0])
    logger.info("Finish finetuning", ranks=[0])


if __name__ == "__main__":
    main()
