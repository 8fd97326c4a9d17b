"""What torch.save wrote: whole files, files of each rank, files of trainers."""
