"""Lambda Learner (Ramanath et al., KDD 2021): a trained model, corrected for each entity as events arrive."""
