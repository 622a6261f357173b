"""Programs that tests of clusters start in processes of their own."""
