from specexp import models as models  # quiets torchao before transformers is first imported
