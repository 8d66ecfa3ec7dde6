"""Operations a step is made of. Each file has the operation with its torch reference; CUDA tensors take the Triton
kernel of the same name in `triton/`, which nothing else imports: without a GPU Triton need not be installed."""
