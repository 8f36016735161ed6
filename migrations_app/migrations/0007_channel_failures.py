from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('migrations_app', '0006_everything_that_moves'),
    ]

    operations = [
        migrations.AddField(
            model_name='movechannel',
            name='failures',
            field=models.PositiveSmallIntegerField(default=0),
        ),
    ]
